"""LoRA adapters of linear layers, and of the matrix that expands latents."""
