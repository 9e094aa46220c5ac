"""Processes that start beside each other with an empty store: one of them compiles a kernel.

The others wait for it and find it in the store. A lock is an empty file, and ends with the process
that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds until nobody is waited for any longer: a kernel takes up to ten to compile on a core of
# its own. What is compiled twice costs time and nothing else.
_PATIENCE_S = 60.0
_PAUSE_S = 0.02


@contextmanager
def held(lock: Path, patience: float = _PATIENCE_S) -> Iterator[bool]:
    """Hold a file against other processes and threads, which is made where it is not there.

    Say whether it is held: it is not where another one has held it for `patience` seconds, or where
    the file system has no locks, or no room.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _take(descriptor, time.monotonic() + patience)
    finally:
        os.close(descriptor)


def _take(descriptor: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_PAUSE_S)
        except OSError:
            return False
