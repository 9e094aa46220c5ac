"""Checkpoint files: finding them, reading their tensors, and reading ahead."""
