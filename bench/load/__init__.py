"""From a command to a model that can step: reading a checkpoint, starting a server."""
