"""Formats of stored weights: a file for each, and how a checkpoint's format is chosen."""
