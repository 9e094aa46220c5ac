"""How the team's threads synchronise: atomics, a barrier, and sleep if there is no work.

All shared state is in one control block of cache lines (`control_block.py`). A waiting thread first
spins, since the next barrier is a microsecond away. Then it yields its core between looks, since
another thread may need it. A worker that has waited for some milliseconds sleeps on a semaphore.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.control_block import (
    ARRIVED,
    ITEMS,
    LINE,
    POSTED,
    WORKER_BYTES,
    WORKERS,
)
from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.emit import I32, I64, address, at, call, none, operation

# Looks before the core is yielded between steps, about ten microseconds: it is unknown when the
# next one comes. How many at a barrier, the team says (`team.py`).
_SPINS = 256
_YIELDS = 512  # yields before a worker sleeps; milliseconds on an idle machine


_PAUSES = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint"}


@operation(types.none)
def pause(builder: Any) -> Any:
    """Emit the processor's hint for a spin loop."""
    name = _PAUSES.get(platform.machine())
    if name is not None:
        call(builder, name, ir.VoidType(), *([I32(1)] if name.endswith("hint") else []))
    return none()


@operation(types.int64, address)
def atomic_load(builder: Any, where: Any) -> Any:
    """Read an int64 that other threads write."""
    return builder.load_atomic(at(builder, where), "seq_cst", 8, typ=I64)


@operation(types.int64, address, types.int64)
def atomic_add(builder: Any, where: Any, value: Any) -> Any:
    """Add to an int64; return its old value."""
    return builder.atomic_rmw("add", at(builder, where), value, "seq_cst")


@operation(types.int64, address, types.int64)
def atomic_exchange(builder: Any, where: Any, value: Any) -> Any:
    """Write an int64; return its old value."""
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
    """Return the address of operation i's counter of work items taken."""
    return control + ITEMS + i % 2 * LINE


@kernel
def barrier(control, threads, spins, arrived):
    """Wait for all threads, and yield the core after every `spins` looks.

    `arrived`: arrivals before this barrier; returns those after it.
    """
    target = arrived + threads
    if threads > 1:
        atomic_add(control + ARRIVED, 1)
        left = spins
        while atomic_load(control + ARRIVED) < target:
            pause()
            left -= 1
            if left == 0:
                give_up_core()
                left = spins
    return target


@kernel
def post(control, threads):
    """Let the workers begin a step, whose input has been written."""
    atomic_add(control + POSTED, 1)
    for rank in range(1, threads):
        worker = control + WORKERS + rank * WORKER_BYTES
        if atomic_exchange(worker, 0) == 1:
            wake(worker + LINE)


@kernel
def wait_for_post(control, rank, seen):
    """Wait until more than `seen` steps have been posted; return their number. Spins, then sleeps.

    No wake-up is lost: the flag says "asleep" before the last look, and the poster clears it and
    posts the semaphore, which counts.
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
