"""The parts of loading a runner from a checkpoint; `torch_loading.py` is the entry point."""
