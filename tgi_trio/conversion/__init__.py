"""Checkpoints in other shapes made into safetensors: pickles converted, LoRA adapters merged.

`child.py` is what the rest of the project calls; it runs the others in a process of their own.
"""
