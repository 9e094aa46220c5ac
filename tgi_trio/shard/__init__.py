"""The shard process: weights, KV cache, forward steps and sampling. Never imports the router."""
