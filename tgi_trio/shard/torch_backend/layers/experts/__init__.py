"""Mixtures of experts: routing, and all experts of a layer in one launch (grouped GEMM)."""
