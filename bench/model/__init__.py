"""A model's steps without a server: forward pass, sampler, threads, drafts, 8 bits."""
