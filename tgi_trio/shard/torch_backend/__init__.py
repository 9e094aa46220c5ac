"""Models in torch, on a CUDA device or a CPU."""
