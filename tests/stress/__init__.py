"""Whole servers under faults, floods and hostile input, for as long as one likes.

Programs, `python -m tests.stress.chaos` and its neighbours. pytest runs each in its smallest form
alone (`tests/bench/test_smoke.py`), and a slice of faults and of hostile input.
"""
