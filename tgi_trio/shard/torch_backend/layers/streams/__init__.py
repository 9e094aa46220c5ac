"""Several hidden states of a token: hyper-connections, Alternating Updates, gated ones."""
