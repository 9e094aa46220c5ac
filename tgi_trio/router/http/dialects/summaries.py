"""What stands for the part of a conversation that was too long to be sent again."""

from __future__ import annotations


def tell_summary(text: str) -> str:
    """Return a summary as words of the model's own."""
    return f"Summary of what was said and done until here:\n\n{text}"
