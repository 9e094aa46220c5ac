"""Speculators, which draft another model's next tokens: their kinds and files."""
