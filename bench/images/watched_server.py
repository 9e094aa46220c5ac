"""`python -m bench.images.watched_server FILE FLAGS...`: the server, its loop's turns timed.

A turn is what the router's loop does between two looks at its sockets: for so long nothing else of
it can run. They are written to FILE, an array of numpy's, when the server has ended.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from tgi_trio.__main__ import main

_MOST: Final = 500_000  # turns that are remembered
_TICK_S: Final = 1e-3


class LoopWatch(trio.abc.Instrument):
    """Times the turns of a loop."""

    def __init__(self) -> None:
        # Of each, in seconds: when it ended (CLOCK_MONOTONIC, as other processes have it), its
        # time, the CPU time that the loop's thread had in it (less on a busy machine), and for how
        # long another thread held the interpreter (GIL) before it.
        self.turns = array("d")
        self._began = (0.0, 0.0)
        self._slept = (0.0, 0.0)  # since when, and the process' CPU time then
        self._held = 0.0

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.monotonic(), time.thread_time()
        # The loop wanted to go on at the end of its timeout at the latest. If it did not, it was
        # for another thread only if one has computed meanwhile.
        late = self._began[0] - self._slept[0] - timeout
        self._held = max(0.0, min(late, time.process_time() - self._slept[1]))

    def before_io_wait(self, timeout: float) -> None:
        now, (began, cpu) = time.monotonic(), self._began
        if began and len(self.turns) < 4 * _MOST:
            self.turns.extend((now, now - began, time.thread_time() - cpu, self._held))
        self._slept = now, time.process_time()


async def _tick() -> None:
    """Have the loop want to go on every millisecond, so that what keeps it from that shows."""
    while True:
        await trio.sleep(_TICK_S)


async def _run_ticking(main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    trio.lowlevel.spawn_system_task(_tick)
    return await main(*args)


def serve(file: Path, argv: list[str], main: Callable[[list[str]], int] = main) -> int:
    """Serve by `main` until a signal says stop; returns the exit code."""
    watch = LoopWatch()
    # The launcher has no seam for benchmarks.
    run: Callable[..., Any] = trio.run
    trio.run = partial(run, _run_ticking, instruments=[watch])  # type: ignore[assignment]
    try:
        return main(argv)
    finally:
        with file.open("wb") as opened:
            np.save(opened, np.array(watch.turns).reshape(-1, 4))


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2:]))
