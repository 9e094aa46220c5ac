"""Converts checkpoints to safetensors: pickles, and bases with merged LoRA adapters.

The rest of the project calls `child.py`, which runs the other files in a process of their own.
"""
