"""Formats of quantised weights that are read: their descriptions in config.json, and tensors.

A file per format lists the tensors of a matrix, with their dtypes and shapes. Launcher and
loaders check headers by it; a file in `shard/checkpoint/formats/` reads the numbers.
"""
