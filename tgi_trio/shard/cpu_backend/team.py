"""The team of threads that run a step: pinned, spinning between operations, asleep when idle."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu_backend import control_block as layout
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import TAKE_PART
from tgi_trio.shard.cpu_backend.tables import STEP
from tgi_trio.shard.cpu_backend.variant import Variant

# Looks at a barrier before the core is yielded: about 0.6 ms, as the others are nearly there, and a
# thread that yields its core to a busy process gets it back after milliseconds, a hundred times a
# step.
_SPINS: Final = 16384
# And about 20 microseconds, where others are to have the cores of threads that wait.
_PASSIVE_SPINS: Final = 512


def barrier_spins(environment: Mapping[str, str]) -> int:
    """Return how often a thread looks at a barrier before it yields its core.

    OpenMP's variable says for all teams of a process that threads which wait are to be passive.
    """
    passive = environment.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE"
    return _PASSIVE_SPINS if passive else _SPINS


class Team:
    """Threads that run `take_part` for one table of operations; a context manager, to stop them.

    The calling thread is rank 0. A process with a team must not fork: the child would have its
    locks without its threads.
    """

    def __init__(self, variant: Variant, operations: NDArray[np.void], cores: list[int]) -> None:
        """`cores`: a processor for each thread; the first is the caller's."""
        self.step = allocate_zeroed((1,), STEP)  # the input of the next `run`, filled by the caller
        self.step["spins"] = barrier_spins(os.environ)
        self.variant = variant
        self._operations = operations
        self.cores = cores
        self._control = allocate_zeroed((layout.control_bytes(len(cores)),), np.uint8)
        self._signals = self._control.view(np.int64)
        self._addresses = address(self.step), address(operations), address(self._control)
        self._workers: list[threading.Thread] = []
        # the caller's thread, and its affinity before
        self._pinned: tuple[int, set[int]] | None = None

    def start(self) -> None:
        """Compile, then start the workers and pin all threads; a team of one is not pinned."""
        self._kernel = TAKE_PART.open(self.variant)
        self.step["threads"] = 1
        self.step["first"] = self.step["end"] = 0
        self.run()  # before there are workers, which a compiler error would leave waiting
        if len(self.cores) == 1:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        for rank in range(1, len(self.cores)):
            where = address(self._control) + layout.semaphore_offset(rank)
            if libc.sem_init(ctypes.c_void_p(where), 0, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")
        self._signals[layout.POSTED // 8] = 0
        for rank in range(1, len(self.cores)):
            worker = threading.Thread(
                target=self._work, args=(rank,), name=f"cpu-{rank}", daemon=True
            )
            worker.start()
            self._workers.append(worker)
        self._pinned = threading.get_native_id(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.cores[0]})
        self.step["threads"] = len(self.cores)

    def run(self) -> None:
        """Run the operations that `step` names, on all threads; returns when all are done."""
        self.step["arrived"] = self._signals[layout.ARRIVED // 8]
        self._take_part(0)

    def stop(self) -> None:
        """End the workers and restore the caller's affinity; may be called twice."""
        self._signals[layout.STOPPED // 8] = 1
        if self._workers:
            self.step["first"] = self.step["end"] = 0
            self.run()
        for worker in self._workers:
            worker.join()
        self._workers.clear()
        if self._pinned is not None:
            # that thread has ended, and another one stops the team
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(*self._pinned)
            self._pinned = None

    def __enter__(self) -> Team:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _work(self, rank: int) -> None:
        os.sched_setaffinity(0, {self.cores[rank]})  # only this thread
        self._take_part(rank)

    def _take_part(self, rank: int) -> None:
        self._kernel(rank, *self._addresses)
