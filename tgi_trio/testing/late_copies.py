"""Copies in the host's memory that are made as late as a device may make them, for fake models.

A copy is made when it is found to be over, which takes some looks; until then, the block to which
it goes holds garbage. So a step that reads a block too early, or overwrites one that is not copied
out yet, is found out by what it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.transfers import Transfer

_LOOKS = 6  # after which a launch is over
_GARBAGE = 0xB3  # every byte


class LateCopies:
    """`HostCopies` of arrays whose first dimension counts blocks, and of others, slots."""

    def __init__(
        self, blocks: NDArray[np.int64], slots: NDArray[np.int64], places: tuple[int, int]
    ) -> None:
        """`places`: of blocks, and of slots."""
        self._arrays = (blocks, slots)
        self._host = tuple(
            np.zeros((1 + count, *array.shape[1:]), np.int64)
            for array, count in zip(self._arrays, places, strict=True)
        )
        self._waiting: deque[ListLike[Transfer]] = deque()
        self._done = self._looks = 0

    @property
    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What the host has, by places; that of place 0 is nobody's."""
        blocks, slots = self._host
        return blocks, slots

    @property
    def done(self) -> int:
        self._looks += 1
        if self._waiting and self._looks % _LOOKS == 0:
            self._make(self._waiting.popleft())
        return self._done

    def launch(self, transfers: ListLike[Transfer]) -> None:
        for _, place, _, states in transfers:
            if not 1 <= place < len(self._host[states]):
                raise ValueError(f"place {place} is not in the host's memory")
        self._waiting.append(transfers)
        if len(self._waiting) == 1:
            self._begin()

    def finish(self) -> None:
        while self._waiting:
            self._make(self._waiting.popleft())

    def _make(self, transfers: ListLike[Transfer]) -> None:
        for item, place, back, states in transfers:
            device, host = self._arrays[states], self._host[states]
            if back:
                device[item] = host[place]
            else:
                host[place] = device[item]
        self._done += 1
        if self._waiting:
            self._begin()

    def _begin(self) -> None:
        """Spoil the blocks to which the next launch copies, unless it copies them out before."""
        copied_out = {(each.states, each.item) for each in self._waiting[0] if not each.back}
        for item, _, back, states in self._waiting[0]:
            if back and (states, item) not in copied_out:
                self._arrays[states][item].view(np.uint8)[:] = _GARBAGE
