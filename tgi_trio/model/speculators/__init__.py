"""Speculators: what guesses the next tokens of another model, and which files it is made of."""
