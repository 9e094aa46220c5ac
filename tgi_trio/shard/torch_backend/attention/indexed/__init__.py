"""Sparse attention: an index chooses tokens, runs or blocks of the context for each query."""
