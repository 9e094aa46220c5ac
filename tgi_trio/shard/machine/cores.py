"""The processors on which this process may compute, and how many threads suit a model. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from tgi_trio.model.checkpoint_tensors import weight_bytes
from tgi_trio.shard.machine.cgroups import read_quota

# Weights per thread at least: with fewer, waking a thread costs more than it saves.
_BYTES_PER_THREAD = 32 << 20


def usable_cores() -> list[int]:
    """Return one processor of every physical core that this process may use, in order.

    At most as many as the CPU quota of our control groups: further threads would only wait.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    quota = read_quota()
    return list(cores.values())[: None if quota is None else max(1, quota)]


def share_cores(cores: Sequence[int], place: int, ranks: int, count: int = 0) -> list[int]:
    """Return the processors of one of `ranks` on a machine, `count` of them; 0: an equal share.

    Those of others only where there are fewer than all ranks want. Never one twice.
    """
    count = min(count or max(1, len(cores) // ranks), len(cores))
    return [cores[(place * count + each) % len(cores)] for each in range(count)]


def sensible_threads(folder: Path, cores: int) -> int:
    """Return how many threads suit a model of this size, at most one per core.

    Every operation of a small model ends before a second thread is awake, and on shared cores
    waiting for that thread would cost many times the operation.
    """
    size = weight_bytes(folder)
    return max(1, min(cores, size // _BYTES_PER_THREAD))


@contextmanager
def running_on(cores: Set[int]) -> Iterator[None]:
    """Let this thread, and those that it starts, run on `cores`, whatever it is bound to."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
