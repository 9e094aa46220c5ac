"""Formats of quantised weights that are read: what config.json says of one, and the tensors it has.

A file per format says which tensors make up a matrix, of which types and shapes. Launcher and
loaders check headers by it; a file of `shard/checkpoint/formats/` reads the numbers.
"""
