"""What a model is, as its folder says it: read by the router and by every backend.

No torch, no transformers, no numba and no numpy: a start that cannot work is refused by these files
before any of them is imported.
"""
