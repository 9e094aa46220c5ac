"""File locks: of processes that start together with an empty store, one compiles a kernel.

The others wait for it and find the result in the store. A lock is an empty file, held with flock,
so it is released when its process ends, however that happens.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds to wait for another process: a kernel takes up to ten to compile on a core of its own.
# Compiling it twice costs only time.
_PATIENCE_S = 60.0
_PAUSE_S = 0.02


@contextmanager
def hold_lock(lock: Path, patience: float = _PATIENCE_S) -> Iterator[bool]:
    """Lock a file against other processes and threads, creating it if needed; yield whether held.

    It is not held if another process has held it for `patience` seconds, or if the file system has
    no locks or no space.
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
