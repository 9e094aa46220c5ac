"""Whole servers under load: ours against its bare model, and beside others."""
