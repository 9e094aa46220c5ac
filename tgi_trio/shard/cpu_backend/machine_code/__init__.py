"""The cache of machine code: compiled once, kept as object files, loaded without a compiler.

`entry.py` names what can be compiled, `store.py` keeps it, `object_files.py` makes it callable, and
`parallel.py` compiles in parallel processes.
"""
