"""Choosing tokens, without torch: logits processors, truncation, random numbers, grammars."""
