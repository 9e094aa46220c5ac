"""Machine code that lays a file's quantised blocks out as panels, in one pass; see `kinds/kind.py`.

Written in LLVM IR directly, because packing begins before kernels are imported. Each filler does
byte for byte what `kinds/` does with numpy; the tests compare the two.
"""
