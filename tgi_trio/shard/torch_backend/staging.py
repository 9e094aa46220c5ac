"""Asynchronous copies between host and device through pinned memory; many arrays in one copy.

A copy from pageable memory makes the host wait until the driver has taken it; from pinned memory
the device fetches it when its stream gets there. Until then the host must not write there again, so
pinned buffers are used in turn, each with an event that says when it is free.

Pinned memory is never freed here: torch calls the driver then, and if the device has been lost
meanwhile, that ends the process on the spot, before anybody can say why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import fixed_array
from tgi_trio.shard.machine.accelerator import is_accelerator, record_event
from tgi_trio.shard.torch_backend.padding import next_power_of_2

_ALIGNMENT = 16  # bytes, of every array's beginning
_TURNS = 4  # pinned buffers, for one copy a step: more than there are steps in flight
_LEAST = 1 << 12  # bytes of the smallest buffer

Array = NDArray[Any]
# Returns arrays as tensors on a device, in memory of their own.
Send: TypeAlias = Callable[[Sequence[Array]], list[torch.Tensor]]


class _Prefixes:
    """The first bytes of a block of memory as a view, cached for the last size."""

    __slots__ = ("_found", "_memory", "_size")

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = self._found = memory  # uint8
        self._size = memory.numel()

    def of(self, size: int) -> torch.Tensor:
        if size != self._size:
            self._size, self._found = size, self._memory[:size]
        return self._found


class _Pinned:
    """A buffer on the host, and an event after which the device has read it."""

    __slots__ = ("bytes", "free", "memory", "prefixes", "size")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # uint8
        self.prefixes = _Prefixes(memory)
        self.bytes = memory.numpy()  # the same
        self.size = len(self.bytes)
        self.free: torch.Event | None = None


class Sheet:
    """The host's copy of a block of device memory that holds arrays, updated in place.

    Most inputs of a recording are the same in step after step. So an array is not written again,
    nor a table sent again, if it is the same read-only object as the last time.
    """

    def __init__(self, idle: Sequence[Array], target: torch.Tensor, *, shared: bool) -> None:
        """`idle`: arrays of the largest sizes; their ends pad shorter arrays.

        The last one is a table of zeros, [rows, width]; narrower ones take less memory. `target`:
        the device's memory, uint8. `shared`: others write to it as well, so everything has to be
        sent each time.
        """
        self.bytes = np.zeros(packed_size(idle), np.uint8)
        self.target = _Prefixes(target)
        self._columns: list[Array] = []
        at = 0
        for array in idle:
            flat = self.bytes[at : at + array.nbytes]
            self._columns.append(flat.view(array.dtype).reshape(array.shape))
            at += aligned(array.nbytes)
        self._table = self._columns.pop().reshape(-1)  # pages that no table reaches stay untouched
        self._rows, self._fixed = len(idle[-1]), packed_size(idle[:-1])
        self.used = self._fixed  # bytes of all that has been written
        self._idle = list(idle[:-1])
        self._lengths = [len(array) for array in self._idle]
        self._sizes = [len(column) for column in self._columns]
        # The last arrays, if read-only; None for those that may have changed since.
        self._there: list[Array | None] = [fixed_array(array) for array in self._idle]
        self._table_there: Array | None = None
        self._table_sent: Array | None = None  # never where the target is `shared`
        self._shared = shared
        self._all_sent = False  # the target has the same content
        for column, array in zip(self._columns, self._idle, strict=True):
            column[...] = array

    def write(self, arrays: Sequence[Array]) -> int:
        """Write arrays over the last ones; return how many bytes are to be sent.

        That excludes the table if the device has it, and is 0 if the device has everything.
        """
        there, table = self._there, arrays[-1]
        if len(arrays) != len(there) + 1:
            raise ValueError(f"{len(arrays)} arrays, expected {len(there) + 1}")
        for place in compress(range(len(there)), map(is_not, arrays, there)):
            self._put(place, arrays[place])
        if table is self._table_sent:
            return 0 if self._all_sent else self._fixed
        self._table_there, self._table_sent = fixed_array(table), None
        count, width = table.shape
        rows = self._table[: self._rows * width].reshape(self._rows, width)
        rows[:count] = table
        if count < self._rows:
            rows[count:] = 0
        self.used = self._fixed + aligned(rows.nbytes)
        return self.used

    def rewrite(self, arrays: Sequence[Array], places: Sequence[int]) -> int:
        """Do what `write` does if all arrays but those at `places` are the last ones."""
        for place, array in zip(places, arrays, strict=True):
            if array is not self._there[place]:
                self._put(place, array)
        return self.used if self._table_sent is None else self._fixed

    def _put(self, place: int, array: Array) -> None:
        """Write an array over the last one."""
        column, count, length = self._columns[place], len(array), self._lengths[place]
        if count == length == self._sizes[place]:
            column[...] = array
        else:
            column[:count] = array
            if count < length:
                column[count:length] = self._idle[place][count:length]
            self._lengths[place] = count
        self._there[place] = None if array.flags.writeable else fixed_array(array)
        self._all_sent = False

    def note_sent(self) -> None:
        """Note that everything is on its way to `target`."""
        if not self._shared:
            self._table_sent, self._all_sent = self._table_there, True


class Staging:
    """Copies arrays to one device."""

    def __init__(self, device: torch.device, *, turns: int = _TURNS) -> None:
        """`turns`: copies that may be in flight. Memory is allocated when it is first needed."""
        self._device = device
        self._pinned = is_accelerator(device)
        self._most = turns
        self._turns: list[_Pinned] = []
        self._outgrown: list[torch.Tensor] = []  # never freed; in all less than their replacements
        self._next = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, valid until the next call.

        Work launched before that call may still read them: the stream keeps the order.
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
        buffer, at = self._turn(needed), 0
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer.bytes[at : at + len(flat)] = flat
            at += aligned(len(flat))
        self._copy(target[:needed], buffer, needed)

    def fill_from(
        self, sheet: Sheet, arrays: Sequence[Array], places: Sequence[int] | None = None
    ) -> None:
        """Write `arrays` to the sheet, and copy what its target lacks.

        `places`: the places of `arrays` in the sheet, if the others are unchanged; None: all.
        """
        needed = sheet.write(arrays) if places is None else sheet.rewrite(arrays, places)
        if not needed:
            return
        buffer = self._turn(needed)
        buffer.bytes[:needed] = sheet.bytes[:needed]
        self._copy(sheet.target.of(needed), buffer, needed)
        sheet.note_sent()

    def _copy(self, target: torch.Tensor, buffer: _Pinned, needed: int) -> None:
        target.copy_(buffer.prefixes.of(needed), True)  # without waiting
        if self._pinned:
            buffer.free = record_event(self._device)

    def _turn(self, needed: int) -> _Pinned:
        """Return a buffer of at least `needed` bytes that the device no longer reads."""
        if len(self._turns) < self._most:
            self._turns.append(_Pinned(_host_bytes(max(needed, _LEAST), self._pinned)))
            return self._turns[-1]
        buffer = self._turns[self._next]
        self._next = (self._next + 1) % self._most
        if buffer.free is not None and not buffer.free.query():
            buffer.free.synchronize()
        if buffer.size < needed:
            self._outgrown.append(buffer.memory)
            self._turns[self._turns.index(buffer)] = buffer = _Pinned(
                _host_bytes(2 * needed, self._pinned)
            )
        return buffer


class PinnedPool:
    """Pinned memory that is lent and reused; loans may end in any thread."""

    def __init__(self) -> None:
        """Memory is allocated when it is first needed."""
        self.free: list[list[_Strip]] = []  # the strips of each loan that has ended
        self.outgrown: list[_Strip] = []  # never freed; in all less than their replacements

    def lend(self) -> PinnedLoan:
        """Return a place for copies, such as the results of one step."""
        try:
            return PinnedLoan(self, self.free.pop())
        except IndexError:  # a check before `pop` could race with another thread
            return PinnedLoan(self, [])


@dataclass(slots=True, eq=False)
class _Strip:
    """Pinned memory on the host, and the tensor for which it is used."""

    memory: torch.Tensor  # uint8
    here: torch.Tensor  # a view of it
    shape: torch.Size  # of that
    dtype: torch.dtype
    source: weakref.ref[torch.Tensor]  # the last one copied: comparing shapes would take longer
    array: Array | None = None  # `here` as an array, once it has been needed

    @classmethod
    def like(cls, memory: torch.Tensor, source: torch.Tensor) -> _Strip:
        """Return a strip whose `here` is like `source`."""
        here = memory[: source.nbytes].view(source.dtype).view(source.shape)
        return cls(memory, here, source.shape, source.dtype, weakref.ref(source))


class PinnedLoan:
    """Copies in pinned memory, which is reused as soon as this object is gone.

    Copies to this memory that are still in flight then arrive before any that is launched later.
    Not so for copies from it: whoever uploads from here keeps this object until they have arrived.
    """

    __slots__ = ("_pool", "_strips", "_taken")

    def __init__(self, pool: PinnedPool, strips: list[_Strip]) -> None:
        """`strips`: of an earlier loan, one for each copy, since steps are mostly alike."""
        self._pool = pool
        self._strips = strips
        self._taken = 0

    def keep(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of `source`, valid as long as this object is there.

        A copy from a device is complete once an event that is recorded after it is reached.
        """
        return self._take(source).here.copy_(source, non_blocking=True)

    def keep_array(self, source: torch.Tensor) -> Array:
        """Do what `keep` does, but return an array."""
        strip = self._take(source)
        strip.here.copy_(source, True)  # without waiting
        if strip.array is None:
            strip.array = strip.here.numpy()
        return strip.array

    def _take(self, source: torch.Tensor) -> _Strip:
        """Return the next strip, as a tensor like `source`."""
        at, strips = self._taken, self._strips
        self._taken = at + 1
        if at < len(strips):
            strip = strips[at]
            if strip.source() is source:
                return strip
            if strip.shape == source.shape and strip.dtype is source.dtype:
                strip.source = weakref.ref(source)
                return strip
            if strip.memory.numel() >= source.nbytes:
                strips[at] = _Strip.like(strip.memory, source)
                return strips[at]
            self._pool.outgrown.append(strips.pop(at))
        memory = _host_bytes(max(_LEAST, next_power_of_2(source.nbytes)), True)
        strips.insert(at, _Strip.like(memory, source))
        return strips[at]

    def __del__(self) -> None:
        self._pool.free.append(self._strips)


def aligned(size: int) -> int:
    """Return the bytes that an array of `size` bytes takes, with padding."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def packed_size(arrays: Sequence[Array]) -> int:
    """Return the bytes that the arrays take together."""
    return sum([aligned(array.nbytes) for array in arrays])


def split(target: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return views of `target` where `Staging.fill` puts each of the arrays."""
    found, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(target[at : at + array.nbytes].view(dtype).view(array.shape))
        at += aligned(array.nbytes)
    return found


def cut(target: torch.Tensor, groups: Sequence[Sequence[Array]]) -> list[torch.Tensor]:
    """Return views of `target` where `Staging.fill` puts consecutive groups of arrays.

    The last view extends to the end of `target`, since the group's last array may grow.
    """
    found, at = [], 0
    for group in groups:
        found.append(target[at : at + packed_size(group)])
        at += packed_size(group)
    return [*found[:-1], target[at - packed_size(groups[-1]) :]]


def rest(target: torch.Tensor, arrays: Sequence[Array], dtype: torch.dtype) -> torch.Tensor:
    """Return what is left of `target` after the arrays, flat: room for one more of any length."""
    return target[packed_size(arrays) :].view(dtype)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(aligned(max(size, _LEAST)), dtype=torch.uint8, device=device)


def _host_bytes(size: int, pinned: bool) -> torch.Tensor:
    memory = torch.empty(aligned(size), dtype=torch.uint8)
    return memory.pin_memory() if pinned else memory
