"""Recurrences and convolutions over rows of any lengths (Mamba, delta rules), and n-grams."""
