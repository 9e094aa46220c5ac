"""Public helpers for tests: a shard without a model, leak checks, tiny checkpoints."""
