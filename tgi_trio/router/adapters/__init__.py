"""Which adapters have which names, and which of them the shard has in memory."""
