"""Kernels of an index that chooses blocks of tokens by one key each, for all heads alike."""
