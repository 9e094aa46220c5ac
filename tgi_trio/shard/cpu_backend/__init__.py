"""The CPU backend: a whole step in compiled kernels, run by a team of pinned threads.

No torch, and no compiler at run time. The entry point is `cpu_runner.py`; docs/cpu-backend/
explains the design.
"""
