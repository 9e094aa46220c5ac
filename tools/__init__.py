"""What makes parts of this repository and is in no wheel: documents, the embedded model."""
