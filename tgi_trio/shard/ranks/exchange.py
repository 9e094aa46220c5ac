"""Numbers that ranks of one machine show each other through shared memory: microseconds, not a
message's tenth of a millisecond.

Every rank writes to a place of its own, says so by the number of the turn, and waits for the
others'. Two places each are used in turns: who writes the next one but one has seen that all have
written the next, so they have read the one before.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.models.decoder import Ranks

Floats = NDArray[np.float32]

# Machines that show one thread's writes to others in their order.
_IN_ORDER: Final = ("x86_64", "AMD64")
_LINE: Final = 8  # int64 in a cache line, which no two ranks write
_SPINS: Final = 64  # looks between which the core is not given up
_PATIENCE_S: Final = 1800.0  # a rank that hangs is the supervisor's to notice, as with gloo
PLACE: Final = 1 << 20  # numbers that a rank shows at a time


class Exchange:
    """One rank's view of the memory; all call `show` in the same order with as many numbers."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int) -> None:
        """`memory`: of `size_of` bytes, zeros at first."""
        self._rank = rank
        self._turn = 0
        head = 8 * _LINE * ranks
        self._turns = np.frombuffer(memory, np.int64, _LINE * ranks)[::_LINE]
        places = np.frombuffer(memory, np.float32, 2 * ranks * PLACE, head)
        self._places = places.reshape(2, ranks, PLACE)

    @staticmethod
    def size_of(ranks: int) -> int:
        """Return the bytes that so many ranks need; what nobody touches takes none."""
        return 8 * _LINE * ranks + 2 * ranks * PLACE * 4

    @classmethod
    def open(cls, group: Ranks) -> Exchange | None:
        """Have all ranks of a machine open the same memory; None on all of them where one cannot.

        Rank 0 makes a file without a name, which the others find among its descriptors.
        """
        size, mine = cls.size_of(group.size), -1
        place = torch.zeros(2, dtype=torch.int64)
        if group.rank == 0:
            mine = os.memfd_create("tgi-trio-exchange", os.MFD_CLOEXEC)
            os.ftruncate(mine, size)
            place = torch.tensor([os.getpid(), mine])
        pid, descriptor = group.broadcast(place).tolist()
        memory = None
        try:
            found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another machine, or one that hides processes from each other
            pass
        else:
            memory = mmap.mmap(found, size)
            os.close(found)
        fits = memory is not None and platform.machine() in _IN_ORDER
        agreed = group.least(int(fits), torch.device("cpu"))  # all have opened it, too
        if mine >= 0:
            os.close(mine)
        return cls(memory, group.rank, group.size) if agreed and memory is not None else None

    def show(self, numbers: Floats) -> Floats:
        """Return all ranks' `numbers` [n], in rank order [ranks, n]: a view, until the next call.

        n is at most PLACE. Raises RuntimeError when another rank never comes.
        """
        self._turn += 1
        places = self._places[self._turn % 2, :, : len(numbers)]
        places[self._rank] = numbers
        self._turns[self._rank] = self._turn
        looks, deadline = 0, 0.0
        while self._turns.min() < self._turn:
            looks += 1
            if looks % _SPINS == 0:
                os.sched_yield()
                deadline = deadline or time.monotonic() + _PATIENCE_S
                if time.monotonic() > deadline:
                    raise RuntimeError("another rank has not come to a sum")
        return places
