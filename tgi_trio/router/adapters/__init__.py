"""Adapters: their names for clients, and which of them are in the shard's memory."""
