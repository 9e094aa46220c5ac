"""Sizes that kernels pad to."""

from __future__ import annotations


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is no less than `count`; 1 for none.

    Triton's function of that name, on the host and without importing Triton.
    """
    return 1 << max(0, count - 1).bit_length()
