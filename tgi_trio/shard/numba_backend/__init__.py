"""The CPU backend: a whole step in numba kernels, run by a pinned team of threads.

No torch and no compiler at run time. `numba_runner.py` is the way in,
docs/cpu-backend.md the guide.
"""
