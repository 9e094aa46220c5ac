"""Kernels beside attention: rotation of heads, writes to the KV cache, scores of an index."""
