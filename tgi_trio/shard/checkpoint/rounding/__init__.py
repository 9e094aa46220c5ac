"""Rounding of weights to fewer bits during loading: the other meaning of `--quantize`.

An encoding is a row of `choose.py`. Its result has the planes of a format that is read, so that
kernels for that format can multiply it.
"""
