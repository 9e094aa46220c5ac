"""How fast memory can be read: the floor of a decode step at batch 1, which reads every weight.

    python -m bench.machine.bandwidth

On shared machines it changes by the minute, so a measurement means something only between two
probes that agree.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.vectors import add, fill, load, store_float, total
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel
from tgi_trio.shard.cpu_backend.weight_layout import LANES
from tgi_trio.shard.machine.cores import usable_cores

_BYTES = 256 << 20  # per thread: far beyond any cache


@entry
def read(where, end, target):
    """Read memory once, four lines at a time; writes the sum, so that nothing is left out."""
    a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
    for i in range(where, end, 256):
        a, b = add(a, load(i)), add(b, load(i + 64))
        c, d = add(c, load(i + 128)), add(d, load(i + 192))
    store_float(target, total(add(add(a, b), add(c, d))))


class Bandwidth:
    """Memory to read. `gigabytes_per_second()` is one probe."""

    def __init__(self, threads: int | None = None) -> None:
        """One thread per physical core by default."""
        count = threads or len(usable_cores())
        self._parts = [allocate_zeroed((_BYTES,)) for _ in range(count)]
        for part in self._parts:
            part.fill(0)  # zeroed memory has no pages of its own before it is written
        self._sums = np.zeros((count, LANES), np.float32)  # a line of the cache for each
        self._read = open_kernel(read, 3)

    def gigabytes_per_second(self, repeats: int = 5) -> float:
        """Return the median of `repeats`, all threads reading at once.

        Not the best of them: what is measured beside it is a median as well, and others take their
        part of the memory's speed from both.
        """
        return statistics.median(self._once() for _ in range(repeats))

    def _once(self) -> float:
        places = [address(part) for part in self._parts]
        targets = [address(own) for own in self._sums]
        work = [(each, each + _BYTES, to) for each, to in zip(places, targets, strict=True)]
        return _BYTES * len(places) / 1e9 / seconds_at_once(self._read, work)


def seconds_at_once(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> float:
    """Return how long it takes to call `function` with all these arguments, a thread for each."""
    threads = [threading.Thread(target=function, args=arguments) for arguments in calls]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


if __name__ == "__main__":
    for count in range(1, len(usable_cores()) + 1):
        print(f"{count} threads: {Bandwidth(count).gigabytes_per_second():.1f} GB/s")
