"""The layout of the control block, the cache lines that the threads of a team share."""

from __future__ import annotations

from typing import Final

LINE: Final = 64  # bytes of a cache line; what several threads write never shares one
# Places in the control block.
POSTED: Final = 0 * LINE  # steps that were posted so far
ARRIVED: Final = 1 * LINE  # arrivals at barriers, all threads and all barriers together
STOPPED: Final = 2 * LINE  # 1: workers are to return
ITEMS: Final = 3 * LINE  # two counters of pieces of work that were taken, for operations in turns
WORKERS: Final = 5 * LINE  # then, per thread, a flag that it sleeps, and its semaphore
WORKER_BYTES: Final = 2 * LINE


def control_bytes(threads: int) -> int:
    """Return the size of the control block."""
    return WORKERS + threads * WORKER_BYTES


def semaphore_offset(rank: int) -> int:
    """Return where a thread's semaphore lies in the control block."""
    return WORKERS + rank * WORKER_BYTES + LINE
