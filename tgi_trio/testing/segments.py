"""Checks for shared memory that is left in /dev/shm."""

from __future__ import annotations

import os
import time

_BROWSER = ".org.chromium."  # prefix of names that a browser has there while it runs


def names_in_shm() -> set[str]:
    """Return the names in /dev/shm except a browser's; our segments have none there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_BROWSER)}


def names_left(before: set[str], patience: float = 60.0) -> set[str]:
    """Return the names that are not in `before`, and are still there after `patience` seconds.

    Other programs, and libraries, give their segments names for a moment, or longer on a busy
    machine; those do not count.
    """
    deadline = time.monotonic() + patience
    left = names_in_shm() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= names_in_shm()
    return left
