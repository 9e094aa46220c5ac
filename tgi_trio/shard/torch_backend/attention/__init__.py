"""Attention over a paged KV cache: one interface, a backend per kind of machine."""
