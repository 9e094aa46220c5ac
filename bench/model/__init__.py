"""A model's steps without a server: forward pass, sampler, threads, guesses, 8 bits."""
