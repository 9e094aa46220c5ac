"""The kinds of quantised weights that the kernels multiply as stored.

A kind is described by a file here, which has its layout and a function that reads it, and a row in
`table.py`.
"""
