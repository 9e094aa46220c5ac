"""LoRA adapters of a decoder in torch: loaded while steps run, chosen by row."""
