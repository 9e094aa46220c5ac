"""What is left in /dev/shm."""

from __future__ import annotations

import os
import time

_BROWSER = ".org.chromium."  # has names there for as long as it runs


def names_in_shm() -> set[str]:
    """Return the names in /dev/shm, where our segments have none, but for a browser's."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_BROWSER)}


def names_left(before: set[str], patience: float = 60.0) -> set[str]:
    """Return the names that are there now, were not in `before`, and stay for `patience` seconds.

    Other programs, libraries among them, give what they share a name for a moment, a long one on a
    busy machine: one that is seen and goes away again was not left.
    """
    deadline = time.monotonic() + patience
    left = names_in_shm() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= names_in_shm()
    return left
