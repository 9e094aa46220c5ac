"""Numbers of the host on their way to a device, in one copy that nobody waits for, and back.

A copy from ordinary memory makes the host wait until the driver has taken it; from pinned memory
the device fetches it when its stream gets there. Until then the host must not write there again, so
pinned buffers are taken in turn, each with an event that says when it is free.

Pinned memory is never given back here: torch asks the driver about it then, and where the device
has been lost meanwhile it ends the process on the spot, before anybody can say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.machine.accelerator import is_accelerator, record_event

_ALIGNMENT = 16  # bytes; of every array's beginning
_TURNS = 4  # pinned buffers of those who send once a step: more than steps in flight
_LEAST = 1 << 12  # bytes of a buffer

Array = NDArray[Any]
# Returns arrays as tensors on a device, in memory of their own.
Send: TypeAlias = Callable[[Sequence[Array]], list[torch.Tensor]]


@dataclass(slots=True)
class _Pinned:
    """A buffer of the host, and when the device has read it."""

    memory: torch.Tensor  # uint8
    free: torch.Event | None = None


class Staging:
    """Copies arrays to one device."""

    def __init__(self, device: torch.device, *, turns: int = _TURNS) -> None:
        """Take memory when it is first needed; `turns`: copies that may be on their way."""
        self._device = device
        self._most = turns
        self._turns: list[_Pinned] = []
        self._outgrown: list[torch.Tensor] = []  # together less than what took their places
        self._next = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, valid until the next call.

        What is launched before that call may still read them: the stream keeps the order.
        """
        needed = packed_size(arrays)
        if self._scratch.numel() < needed:
            self._scratch = _bytes(2 * needed, self._device)
        self.fill(self._scratch, arrays)
        return split(self._scratch, arrays)

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, in memory of their own."""
        target = torch.empty(packed_size(arrays), dtype=torch.uint8, device=self._device)
        self.fill(target, arrays)
        return split(target, arrays)

    def fill(self, target: torch.Tensor, arrays: Sequence[Array]) -> None:
        """Copy the arrays to the beginning of `target`, uint8, where `split` finds them."""
        needed = packed_size(arrays)
        buffer = self._turn(needed)
        host, at = buffer.memory.numpy(), 0
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[at : at + len(flat)] = flat
            at += aligned(len(flat))
        target[:needed].copy_(buffer.memory[:needed], non_blocking=True)
        if is_accelerator(self._device):
            buffer.free = record_event(self._device)

    def _turn(self, needed: int) -> _Pinned:
        """Return a buffer of at least `needed` bytes that the device has read."""
        pinned = is_accelerator(self._device)
        if len(self._turns) < self._most:
            self._turns.append(_Pinned(_host_bytes(max(needed, _LEAST), pinned)))
            return self._turns[-1]
        buffer = self._turns[self._next]
        self._next = (self._next + 1) % self._most
        if buffer.free is not None and not buffer.free.query():
            buffer.free.synchronize()
        if buffer.memory.numel() < needed:
            self._outgrown.append(buffer.memory)
            buffer.memory = _host_bytes(2 * needed, pinned)
        return buffer


class PinnedPool:
    """Pinned memory that is lent, and lent again; any thread may give it back."""

    def __init__(self) -> None:
        """Take memory when it is first needed."""
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes

    def lend(self) -> PinnedLoan:
        """Return where copies are kept: what comes down of one step, say."""
        return PinnedLoan(self._free)


class PinnedLoan:
    """Copies in pinned memory, which is another's as soon as this is gone.

    What is still on its way to them then lands before anything that is launched later does. What is
    on its way from them does not: whoever sends them up keeps this until it has arrived.
    """

    __slots__ = ("_free", "_taken")

    def __init__(self, free: defaultdict[int, list[torch.Tensor]]) -> None:
        self._free = free
        self._taken: list[torch.Tensor] = []

    def keep(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of `source`, valid as long as this is there.

        A device's has come once an event that is recorded later is reached.
        """
        size = max(_LEAST, 1 << (source.nbytes - 1).bit_length())
        try:
            memory = self._free[size].pop()
        except IndexError:  # asked for before, it might be another thread's by now
            memory = _host_bytes(size, True)
        self._taken.append(memory)
        target = memory[: source.nbytes].view(source.dtype).view(source.shape)
        return target.copy_(source, non_blocking=True)

    def __del__(self) -> None:
        for memory in self._taken:
            self._free[memory.numel()].append(memory)


def aligned(size: int) -> int:
    """Return the bytes that an array of `size` bytes takes among others."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def packed_size(arrays: Sequence[Array]) -> int:
    """Return the bytes that the arrays take together."""
    return sum(aligned(array.nbytes) for array in arrays)


def split(target: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return where `Staging.fill` puts each of the arrays in `target`, as tensors like them.

    A last array that is shorter than what is left of `target` may grow: see `rest`.
    """
    found, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(target[at : at + array.nbytes].view(dtype).view(array.shape))
        at += aligned(array.nbytes)
    return found


def cut(target: torch.Tensor, groups: Sequence[Sequence[Array]]) -> list[torch.Tensor]:
    """Return where `Staging.fill` puts each group of arrays, all of them one behind the other.

    The last group has all that is left: its last array may grow.
    """
    found, at = [], 0
    for group in groups:
        found.append(target[at : at + packed_size(group)])
        at += packed_size(group)
    return [*found[:-1], target[at - packed_size(groups[-1]) :]]


def rest(target: torch.Tensor, arrays: Sequence[Array], dtype: torch.dtype) -> torch.Tensor:
    """Return all of `target` behind the arrays, flat: where one more of any length may go."""
    return target[packed_size(arrays) :].view(dtype)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(aligned(max(size, _LEAST)), dtype=torch.uint8, device=device)


def _host_bytes(size: int, pinned: bool) -> torch.Tensor:
    return torch.empty(aligned(size), dtype=torch.uint8, pin_memory=pinned)
