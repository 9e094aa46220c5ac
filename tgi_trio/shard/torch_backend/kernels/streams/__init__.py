"""Several hidden states of a token, and what lies between the products of their layers."""
