"""A compiler for the subset of Python that kernels are written in.

It goes from the syntax tree straight to LLVM's instructions, in one pass, and compiles a function
once for each combination of its arguments' types. `types.py` has the types, `values.py` and
`arithmetic.py` what is computed with them, `expressions.py` and `statements.py` the syntax,
`program.py` all functions of an entry. What a kernel must not contain is an error that names the
line.
"""
