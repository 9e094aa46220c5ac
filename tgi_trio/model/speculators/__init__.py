"""Speculators, which guess another model's next tokens: their kinds and files."""
