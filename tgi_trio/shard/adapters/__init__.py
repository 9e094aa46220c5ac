"""The numbers of LoRA adapters, as every backend packs them. No torch in this room."""
