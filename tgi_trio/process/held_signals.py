"""Signals wait while libraries are imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_HELD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Keep the signals that end a program until the block is left, where they have their effect.

    What a signal raises goes through whatever runs. Libraries that are written in other languages
    are not all ready for that while they are initialised: orjson ends in a segmentation fault, and
    numpy tells of a broken installation.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
