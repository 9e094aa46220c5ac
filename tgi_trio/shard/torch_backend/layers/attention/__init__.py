"""What is around attention in a layer: heads, rotary positions, latents (MLA), indexes, entries."""
