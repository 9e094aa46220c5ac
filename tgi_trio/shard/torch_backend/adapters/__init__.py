"""LoRA adapters of a decoder in torch: loaded beside the steps, added row by row."""
