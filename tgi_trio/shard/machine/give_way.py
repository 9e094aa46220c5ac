"""Threads that work beside the steps, on whatever the steps leave."""

from __future__ import annotations

import os
from collections.abc import Set


def give_way(cores: Set[int], niceness: int) -> None:
    """Let this thread run on any of `cores`, `niceness` beyond that of the steps.

    A thread begins where the one that starts it is pinned: with the kernels' first thread, on its
    core, and there it would be in the way of every step.
    """
    os.sched_setaffinity(0, cores)
    os.nice(niceness)  # Linux: of this thread alone
