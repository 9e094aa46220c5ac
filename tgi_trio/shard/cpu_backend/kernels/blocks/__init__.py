"""Kernels of an index that chooses whole blocks of tokens, for each KV head or for all."""
