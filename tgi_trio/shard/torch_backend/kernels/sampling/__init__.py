"""Sampling on the device: edits of scores, truncation, draws, and top tokens."""
