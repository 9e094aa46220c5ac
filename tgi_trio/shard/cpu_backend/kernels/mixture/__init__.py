"""Kernels of mixtures of experts: routing tokens to experts, and the experts' linear layers."""
