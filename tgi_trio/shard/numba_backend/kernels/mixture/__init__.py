"""Kernels of mixtures of experts: who goes to which expert, and their linear layers."""
