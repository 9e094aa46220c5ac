"""How the team's threads meet: atomics, a barrier, and sleep when there is nothing to do.

Everything shared lies in one control block of cache lines (`control_block.py`). A thread that waits
spins first, since the next barrier is a microsecond away; then it gives up its core between looks,
since somebody else may need it; and a worker that has waited for some milliseconds sleeps in the
kernel.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.ir as ir
from numba import types

from tgi_trio.shard.numba_backend.control_block import (
    ARRIVED,
    ITEMS,
    LINE,
    POSTED,
    WORKER_BYTES,
    WORKERS,
)
from tgi_trio.shard.numba_backend.kernels import kernel
from tgi_trio.shard.numba_backend.kernels.emit import I32, I64, address, at, call, none, operation

# Looks between which the core is not given up. Between steps about ten microseconds: nobody knows
# when the next one comes. At a barrier about 0.6 ms: the others are nearly there, and whoever gives
# its core to a process that computes gets it back after milliseconds, a hundred times a step.
_SPINS = 256
_BARRIER_SPINS = 16384
_YIELDS = 512  # times the core is given up before a worker sleeps; milliseconds on an idle machine


_PAUSES = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint"}


@operation(types.none)
def pause(builder: Any) -> Any:
    """Tell the processor that this is a waiting loop."""
    name = _PAUSES.get(platform.machine())
    if name is not None:
        call(builder, name, ir.VoidType(), *([I32(1)] if name.endswith("hint") else []))
    return none()


@operation(types.int64, address)
def atomic_load(builder: Any, where: Any) -> Any:
    """Read an int64 that others write."""
    return builder.load_atomic(at(builder, where), "seq_cst", 8, typ=I64)


@operation(types.int64, address, types.int64)
def atomic_add(builder: Any, where: Any, value: Any) -> Any:
    """Add to an int64; return what it was."""
    return builder.atomic_rmw("add", at(builder, where), value, "seq_cst")


@operation(types.int64, address, types.int64)
def atomic_exchange(builder: Any, where: Any, value: Any) -> Any:
    """Write an int64; return what it was."""
    return builder.atomic_rmw("xchg", at(builder, where), value, "seq_cst")


@operation(types.int32)
def give_up_core(builder: Any) -> Any:
    """Let another thread that waits for this core run."""
    return call(builder, "sched_yield", I32)


@operation(types.int32, address)
def sleep_on(builder: Any, semaphore: Any) -> Any:
    """Sleep until the semaphore is posted (it may wake up early)."""
    return call(builder, "sem_wait", I32, at(builder, semaphore))


@operation(types.int32, address)
def wake(builder: Any, semaphore: Any) -> Any:
    """Post the semaphore."""
    return call(builder, "sem_post", I32, at(builder, semaphore))


@kernel
def item_counter(control, i):
    """Return the address of operation i's counter of the pieces of work that were taken."""
    return control + ITEMS + i % 2 * LINE


@kernel
def barrier(control, threads, arrived):
    """Wait until all threads are here. `arrived`: arrivals so far; returns those afterwards."""
    target = arrived + threads
    if threads > 1:
        atomic_add(control + ARRIVED, 1)
        looks = 0
        while atomic_load(control + ARRIVED) < target:
            pause()
            looks += 1
            if looks % _BARRIER_SPINS == 0:
                give_up_core()
    return target


@kernel
def post(control, threads):
    """Let the workers begin a step; what they are to read has been written."""
    atomic_add(control + POSTED, 1)
    for rank in range(1, threads):
        worker = control + WORKERS + rank * WORKER_BYTES
        if atomic_exchange(worker, 0) == 1:
            wake(worker + LINE)


@kernel
def wait_for_post(control, rank, seen):
    """Wait until more than `seen` steps were posted; return how many. Spins, then sleeps.

    No wake-up is lost: the flag says "asleep" before the last look, and whoever posts takes the
    flag away and posts the semaphore, which remembers.
    """
    worker = control + WORKERS + rank * WORKER_BYTES
    looks = 0
    while True:
        posted = atomic_load(control + POSTED)
        if posted > seen:
            return posted
        pause()
        looks += 1
        if looks % _SPINS == 0:
            give_up_core()
            if looks >= _SPINS * _YIELDS:
                atomic_exchange(worker, 1)
                if atomic_load(control + POSTED) == seen:
                    sleep_on(worker + LINE)
                looks = 0
