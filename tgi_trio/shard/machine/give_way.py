"""Threads that work beside the steps at a lower priority."""

from __future__ import annotations

import os
from collections.abc import Set


def give_way(cores: Set[int], niceness: int) -> None:
    """Let this thread run on any of `cores`, at a niceness that is higher by `niceness`.

    A thread inherits the affinity of the one that starts it, here of the kernels' first thread, on
    whose core it would delay every step.
    """
    os.sched_setaffinity(0, cores)
    os.nice(niceness)  # Linux: of this thread alone
