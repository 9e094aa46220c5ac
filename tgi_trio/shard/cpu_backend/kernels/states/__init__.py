"""Kernels of recurrent states, a slot per sequence: compiled apart from the step."""
