"""Whether a backend computes a model, and why not."""
