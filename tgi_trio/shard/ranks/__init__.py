"""Tensor parallelism: rank 0 plans and tells the others; ranks meet in a process group."""
