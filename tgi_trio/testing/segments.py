"""What is left in /dev/shm."""

from __future__ import annotations

import os
import time

from tgi_trio.ipc.segment import NAME_PREFIX


def segment_names() -> set[str]:
    """Return the names of our segments in /dev/shm; other programs have theirs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(NAME_PREFIX)}


def names_left(before: set[str], patience: float = 10.0) -> set[str]:
    """Return the names that are there now, were not in `before`, and stay for `patience` seconds.

    Whoever makes a segment gives it a name for microseconds: one that is seen and goes away again
    is another server's that is just starting, not one that was left.
    """
    deadline = time.monotonic() + patience
    left = segment_names() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= segment_names()
    return left
