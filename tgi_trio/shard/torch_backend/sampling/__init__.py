"""The sampler of logits that are torch tensors."""
