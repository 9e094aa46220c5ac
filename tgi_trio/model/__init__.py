"""What a model is, as its folder describes it: read by the router and by every backend.

No torch, no transformers, no llvmlite and no numpy: these files refuse a start that cannot work
before any of them is imported.
"""
