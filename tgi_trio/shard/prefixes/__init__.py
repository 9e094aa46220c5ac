"""Blocks of prefixes outside the KV cache: their copies in the host's memory, and in files."""
