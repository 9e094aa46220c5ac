"""Checkpoint files: which there are, what is in them, and reading them ahead of their use."""
