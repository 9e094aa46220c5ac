"""Paged attention by our Triton kernels: GQA and latents (MLA), split-KV, writes to the cache."""
