"""How weights are stored: a file per format, and which of them a checkpoint is in."""
