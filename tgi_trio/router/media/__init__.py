"""Images of requests: from URLs to tokens in the prompt and pixels for the shard."""
