"""Speculative decoding: draft the next tokens, verify them in one step, keep the right ones."""
