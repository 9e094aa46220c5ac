"""Mixtures of experts: routing, grouped GEMM (plain, codes, trellis), and their LoRA adapters."""
