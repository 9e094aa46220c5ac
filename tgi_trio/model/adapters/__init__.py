"""LoRA adapters in PEFT's format: what a folder says, and which linears of a model it changes.

Names and shapes alone; the numbers are read where they are computed with.
"""
