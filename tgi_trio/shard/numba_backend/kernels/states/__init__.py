"""Kernels of what keeps a state per sequence, in slots: compiled apart from the step."""
