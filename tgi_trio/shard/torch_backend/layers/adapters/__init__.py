"""LoRA adapters of linear layers, latents and embeddings: by row in torch, by slots on a device."""
