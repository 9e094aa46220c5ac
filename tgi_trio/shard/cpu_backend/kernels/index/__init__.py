"""Attention to the tokens that an index chooses (DeepSeek-V3.2, 2025, section 2.1)."""
