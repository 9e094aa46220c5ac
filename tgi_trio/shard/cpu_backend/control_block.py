"""The layout of the control block: cache lines that the threads of a team share."""

from __future__ import annotations

from typing import Final

LINE: Final = 64  # bytes of a cache line; variables that several threads write never share one
# Offsets in the control block.
POSTED: Final = 0 * LINE  # number of steps posted
ARRIVED: Final = 1 * LINE  # number of arrivals at barriers, over all threads and barriers
STOPPED: Final = 2 * LINE  # 1: workers return
ITEMS: Final = 3 * LINE  # two counters of work items taken, which operations use alternately
WORKERS: Final = 5 * LINE  # then, for each thread, a flag that it sleeps, and its semaphore
WORKER_BYTES: Final = 2 * LINE


def control_bytes(threads: int) -> int:
    """Return the size of the control block."""
    return WORKERS + threads * WORKER_BYTES


def semaphore_offset(rank: int) -> int:
    """Return the offset of a thread's semaphore in the control block."""
    return WORKERS + rank * WORKER_BYTES + LINE
