"""Building blocks of the generic decoder: plain objects over tensors, without nn.Module's cost."""
