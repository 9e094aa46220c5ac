"""Architectures without a specification of ours, run through transformers."""
