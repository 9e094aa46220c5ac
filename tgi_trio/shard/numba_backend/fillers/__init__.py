"""Machine code that lays a file's blocks into panels, in one pass; see `kinds/kind.py` for those.

Written for LLVM itself: packing begins before numba has been imported. What each does is what
`kinds/` does with numpy, byte for byte: the tests hold one to the other.
"""
