"""`python -m bench.images.watched_server FILE FLAGS...`: the server, its loop's turns timed.

A turn is what the router's loop does between two looks at its sockets: for so long nothing else of
it can run. They are written to FILE, an array of numpy's, when the server has ended.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import trio

from tgi_trio.__main__ import main

_MOST: Final = 500_000  # turns that are remembered


class LoopWatch(trio.abc.Instrument):
    """Times the turns of a loop."""

    def __init__(self) -> None:
        # When each ended (CLOCK_MONOTONIC, as other processes have it), its time, and the CPU time
        # that the loop's thread had in it: less on a busy machine, all in seconds.
        self.turns = array("d")
        self._began = (0.0, 0.0)

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.monotonic(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        now, (began, cpu) = time.monotonic(), self._began
        if began and len(self.turns) < 3 * _MOST:
            self.turns.extend((now, now - began, time.thread_time() - cpu))


def serve(file: Path, argv: list[str], main: Callable[[list[str]], int] = main) -> int:
    """Serve by `main` until a signal says stop; returns the exit code."""
    watch = LoopWatch()
    # The launcher has no seam for benchmarks.
    trio.run = partial(trio.run, instruments=[watch])  # type: ignore[assignment]
    try:
        return main(argv)
    finally:
        with file.open("wb") as opened:
            np.save(opened, np.array(watch.turns).reshape(-1, 3))


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2:]))
