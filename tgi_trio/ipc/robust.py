"""A robust mutex, which the kernel releases the moment its owner dies.

A pidfd becomes readable only after the dead process's memory has been freed, which takes hundreds
of milliseconds for gigabytes of weights. Robust mutexes are released before that, so a thread that
waits for one learns of the death at once, however large the process was.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from typing import Any

from tgi_trio.ipc.layout import MUTEX_BYTES

_PROCESS_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST
_ATTRIBUTE_BYTES = 64  # room for any libc's pthread_mutexattr_t


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class RobustMutex:
    """A robust process-shared pthread mutex in a shared mapping.

    The object keeps the mapping alive: unmapping a mutex that a thread waits on, or that is still
    in a thread's robust list, would be a crash of this process.
    """

    def __init__(self, mapping: mmap.mmap, offset: int) -> None:
        """Use the mutex at `offset`; only where `available()`."""
        self._bytes = (ctypes.c_char * MUTEX_BYTES).from_buffer(mapping, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._bytes))
        self._libc = _libc()

    def initialise(self) -> None:
        """Make it a robust, process-shared mutex; once, by the creator of the segment."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        libc = self._libc
        _check("pthread_mutexattr_init", libc.pthread_mutexattr_init(attributes))
        try:
            shared = libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            _check("pthread_mutexattr_setpshared", shared)
            _check("robust", libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
            _check("pthread_mutex_init", libc.pthread_mutex_init(self._address, attributes))
        finally:
            libc.pthread_mutexattr_destroy(attributes)

    def hold(self) -> None:
        """Lock it for the calling thread. Raises OSError if it is not free."""
        _check("pthread_mutex_trylock", self._libc.pthread_mutex_trylock(self._address))

    def let_go(self) -> None:
        """Unlock it; by the thread that holds it."""
        _check("pthread_mutex_unlock", self._libc.pthread_mutex_unlock(self._address))

    def wait_for_owner(self, seconds: float) -> bool:
        """Block this thread, without the GIL, until the owner has died or released the mutex.

        Returns False after `seconds`. Afterwards the mutex is free and, if the owner has died,
        cannot be locked again.
        """
        code = self._lock_within(seconds)
        if code == errno.ETIMEDOUT:
            return False
        if code != errno.ENOTRECOVERABLE:
            if code != errno.EOWNERDEAD:
                _check("waiting for a mutex", code)
            # Left locked, it would still be in this thread's robust list after unmapping.
            self.let_go()
        return True

    def _lock_within(self, seconds: float) -> int:
        """Lock it within `seconds`, whatever is done to the machine's clock meanwhile.

        Returns the error's number, 0: none. A libc without `pthread_mutex_clocklock` (glibc has it
        since 2.30) waits by the machine's clock.
        """
        if hasattr(self._libc, "pthread_mutex_clocklock"):
            limit = ctypes.byref(_as_timespec(time.monotonic() + seconds))
            clock = time.CLOCK_MONOTONIC
            return int(self._libc.pthread_mutex_clocklock(self._address, clock, limit))
        limit = ctypes.byref(_as_timespec(time.time() + seconds))
        return int(self._libc.pthread_mutex_timedlock(self._address, limit))


def available() -> bool:
    """Return whether this libc has robust mutexes; without them only the pidfd is used."""
    libc = _libc()
    return all(
        hasattr(libc, f"pthread_{name}") for name in ("mutexattr_setrobust", "mutex_timedlock")
    )


def _as_timespec(at: float) -> _Timespec:
    """Return a moment of a clock, in seconds, as libc takes it."""
    return _Timespec(int(at), int(at % 1 * 1e9))


def _libc() -> Any:
    return ctypes.CDLL(None)  # CDLL, not PyDLL: the GIL is released while a thread waits


def _check(what: str, code: int) -> None:
    if code:
        raise OSError(code, what)
