"""Machine code between starts: compiled once, kept as object files, opened without a compiler.

`entry.py` names what can be compiled, `store.py` keeps it, `opening.py` makes it callable,
`beside.py` has other processes compile what is missing.
"""
