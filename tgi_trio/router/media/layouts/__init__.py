"""The text for an image in a prompt, by family of models: a file for each kind, and one table."""
