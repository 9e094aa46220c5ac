"""LoRA adapters in PEFT's format: a folder's contents, and the linears of a model that they change.

Only names and shapes; the weights are read by the backends.
"""
