"""The cache of machine code: compiled once, kept as object files, loaded without a compiler.

`entry.py` names what can be compiled, `store.py` keeps it, `opening.py` makes it callable, and
`beside.py` compiles in parallel processes.
"""
