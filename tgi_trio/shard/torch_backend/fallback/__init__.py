"""Runs architectures for which we have no spec through transformers."""
