"""Speculative decoding on the device: prompt lookup and the verification of drafts."""
