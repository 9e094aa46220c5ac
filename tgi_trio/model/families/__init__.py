"""A function per model type, from config.json to the decoder's spec, and the tensors' names."""
