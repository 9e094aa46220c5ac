"""The memory that a launch is given: tensors, and pointers that remember theirs.

The interpreter's pointers are plain addresses, so that one that leaves its tensor may arrive in
another. Here the highest 16 bits of an address, which no address of a process has, say of which
argument it is; they survive whatever arithmetic a kernel does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_SHIFT: Final = np.uint64(48)
_ADDRESS: Final = np.uint64((1 << 48) - 1)

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(slots=True)
class Region:
    """The whole memory of a tensor's storage."""

    base: int
    size: int  # in bytes
    content: Bytes
    unwritten: Flags | None = None  # bytes that nothing has written
    before: Bytes | None = None  # its content before the launch, once a program writes to it
    written: Flags | None = None  # bytes that the launch has written
    counted: Flags | None = None  # bytes that atomics of the launch have changed
    grain: int = 16  # bytes of the smallest number read or written here
    shared: list[tuple[int, int]] = field(default_factory=list)  # bytes that are nobody's

    def restore(self) -> None:
        """Undo what the launch has written."""
        if self.before is not None:
            self.content[:] = self.before

    def note_write(self, at: Places, size: int) -> None:
        """Mark numbers of `size` bytes as written; to be called before they are."""
        if self.written is None:
            self.before = self.content.copy()
            self.written = np.zeros(self.size, np.bool_)
        mark(self.written, at, size)

    def note_count(self, at: Places, size: int) -> None:
        """Mark numbers of `size` bytes as changed by an atomic."""
        if self.counted is None:
            self.counted = np.zeros(self.size, np.bool_)
        mark(self.counted, at, size)


class Argument(NamedTuple):
    """A tensor that the kernel was given: a view of a region."""

    name: str
    region: Region
    begin: int  # of the view, in bytes from the beginning of the region
    end: int


class Used(NamedTuple):
    """What some lanes of an access use."""

    argument: Argument
    at: Places  # bytes from the beginning of the region, of each of the lanes
    lanes: Places  # their places in the block


class Stray(NamedTuple):
    """Lanes that leave their tensor."""

    argument: str
    first: int  # bytes from the beginning of its region
    size: int  # of the region
    lanes: int


@dataclass(slots=True)
class Memory:
    """All tensors that a launch is given."""

    arguments: list[Argument] = field(default_factory=list)
    _tensors: list[Any] = field(default_factory=list)  # which must remain where they are
    _regions: dict[int, Region] = field(default_factory=dict)

    @property
    def regions(self) -> Iterator[Region]:
        yield from self._regions.values()

    def add(self, name: str, tensor: Any, *, shared: bool = False) -> int:
        """Add a tensor of the host; return what its address has to be increased by.

        `shared`: whether its first entry is nobody's.
        """
        self._tensors.append(tensor)
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if base not in self._regions:
            whole: Any = (ctypes.c_uint8 * size).from_address(base) if size else bytearray()
            self._regions[base] = Region(base, size, np.frombuffer(whole, np.uint8))
        begin = tensor.data_ptr() - base if tensor.numel() else 0
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        extent = sum((count - 1) * stride for count, stride in steps) + 1 if tensor.numel() else 0
        end = begin + extent * tensor.element_size()
        if shared and tensor.numel():
            entry = begin, begin + tensor.stride(0) * tensor.element_size()
            self._regions[base].shared.append(entry)
        self.arguments.append(Argument(name, self._regions[base], begin, end))
        return len(self.arguments) << int(_SHIFT)

    def find(self, pointers: Any, mask: Any, size: int) -> tuple[list[Used], list[Stray], Any, Any]:
        """Return what is used and what strays, real addresses, and a mask without what strays."""
        lanes = np.flatnonzero(mask)
        flat = pointers.reshape(-1)
        tagged = flat if len(lanes) == flat.size else flat[lanes]
        real = pointers & _ADDRESS
        used, strays = list[Used](), list[Stray]()
        for number in np.unique(tagged >> _SHIFT).tolist() if tagged.size else ():
            own = tagged >> _SHIFT == number
            each = lanes if own.all() else lanes[own]
            addresses = real.reshape(-1)[each].astype(np.int64)
            if not 1 <= number <= len(self.arguments):
                strays.append(Stray("", int(addresses[0]), 0, len(each)))
                mask = _without(mask, each)
                continue
            argument = self.arguments[number - 1]
            at = addresses - argument.region.base
            inside = (at >= 0) & (at + size <= argument.region.size)
            if not inside.all():
                outside = at[~inside]
                found = int(outside[0]), argument.region.size, len(outside)
                strays.append(Stray(argument.name, *found))
                mask = _without(mask, each[~inside])
                at, each = at[inside], each[inside]
            if len(at):
                used.append(Used(argument, at, each))
        return used, strays, real, mask


def _without(mask: Any, lanes: Places) -> Any:
    """Return a mask without some of its lanes."""
    left = np.array(mask, np.bool_)
    left.reshape(-1)[lanes] = False
    return left


def mark(flags: Flags, at: Places, size: int, value: bool = True) -> None:
    """Set the flags of numbers of `size` bytes."""
    for byte in range(size):
        flags[at + byte] = value


def any_of(flags: Flags, at: Places, size: int) -> Flags:
    """Return for each number whether any of its bytes has its flag."""
    found: Flags = flags[at]
    for byte in range(1, size):
        found = found | flags[at + byte]
    return found
