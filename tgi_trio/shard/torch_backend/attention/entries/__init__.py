"""Attention to a window's keys and to entries, keys of whole runs of tokens (DeepSeek V4)."""
