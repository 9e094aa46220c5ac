"""Models of the hub, and of this machine: what a name means, downloads, GGUF files."""
