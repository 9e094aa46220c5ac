"""Prefixes kept in files: the blocks and states of a rank, written at its end, read at a start.

A rank's file is a header and then, part by part, the bytes of all kept blocks, and those of all
kept slots of states::

    0     8 bytes   magic
    8     16 bytes  key of the order, which the router's index has as well
    24    8 x 3     number of blocks, of slots, of parts (little-endian)
    48    8 x 3 n   of each part: bytes of an item, number of items, CRC-32 of all its bytes
    ...             the items of each part

A part is what one layer has of a block (keys, values, an index's keys), or of a slot. Which part
means what follows from the model and its flags, which the router compares.

The router names a file in its index only once all ranks have written theirs to the disk. What is
read is checked nonetheless, since wrong keys would be wrong answers that nobody notices.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.prefixes import (
    KeepOrder,
    PrefixReport,
    RestoreOrder,
    check_owner,
    explain_failure,
)
from tgi_trio.whole_files import open_file

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_MAGIC: Final = b"tgitrio1"
_HEAD: Final = struct.Struct("<8s16s3Q")
_PART: Final = struct.Struct("<3Q")
_AT_ONCE: Final = 32 * 2**20  # bytes that are copied at a time


class Part(Protocol):
    """A tensor whose first dimension counts blocks, or slots; or what has copies of its items, by
    the places of the host's memory.
    """

    @property
    def item_bytes(self) -> int:
        """Bytes of one of them."""
        ...

    def take(self, items: Ints) -> Bytes:
        """Return a copy of some, uint8 [n, item_bytes]."""
        ...

    def put(self, first: int, data: Bytes) -> None:
        """Overwrite neighbouring ones, from the number `first` on, with uint8 [n, item_bytes]."""
        ...


class HostPart:
    """An array in the host's memory."""

    def __init__(self, array: NDArray[Any], items: int) -> None:
        """`array`: contiguous, of so many blocks or slots."""
        self._bytes = array.reshape(items, -1).view(np.uint8)

    @property
    def item_bytes(self) -> int:
        return self._bytes.shape[1]

    def take(self, items: Ints) -> Bytes:
        return self._bytes[items]

    def put(self, first: int, data: Bytes) -> None:
        self._bytes[first : first + len(data)] = data


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """Everything that a rank knows of a computed prefix; empty: nothing can be kept."""

    blocks: Sequence[Part] = ()
    slots: Sequence[Part] = ()
    copies: Sequence[Part] = ()  # of the parts of blocks, one by one; empty: there are none
    slot_copies: Sequence[Part] = ()  # likewise, of slots

    def with_copies(self) -> Iterator[tuple[Part, Part | None, bool]]:
        """Yield each part, with its copies, and whether it is of slots."""
        for parts, copies, of_slots in (
            (self.blocks, self.copies, False),
            (self.slots, self.slot_copies, True),
        ):
            for place, part in enumerate(parts):
                yield part, copies[place] if copies else None, of_slots


class Prefixes(Protocol):
    """What a runner does with prefixes, on all of its ranks."""

    def keep(self, order: KeepOrder, rank: int = 0) -> PrefixReport:
        """Write a file; whatever prevents that is said in the report."""
        ...

    def restore(self, order: RestoreOrder, rank: int = 0) -> PrefixReport:
        """Read a file; if any rank cannot, the blocks hold zeros on all of them."""
        ...


class RankPrefixes:
    """The prefixes of one rank."""

    def __init__(
        self, parts: Callable[[], PrefixParts], agree: Callable[[int], int] | None = None
    ) -> None:
        """`parts`: of the memory as it is now; `agree`: returns the least value of all ranks."""
        self._parts = parts
        self._agree = agree

    def keep(self, order: KeepOrder, rank: int = 0) -> PrefixReport:
        """Write this rank's file, and wait for the others'."""
        try:
            size, error = write_prefixes(find_file(order, rank), self._parts(), order), ""
        except (OSError, ValueError) as failure:
            size, error = 0, explain_failure(failure)
        return self._conclude(size, error, rank)

    def restore(self, order: RestoreOrder, rank: int = 0) -> PrefixReport:
        """Read this rank's file, and wait for the others'."""
        parts = self._parts()
        try:
            size, error = read_prefixes(find_file(order, rank), parts, order), ""
        except (OSError, ValueError) as failure:
            size, error = 0, explain_failure(failure)
        report = self._conclude(size, error, rank)
        if report.error:  # what a mask hides is multiplied by zero, which garbage does not allow
            for part, _, of_slots in parts.with_copies():
                _clear(part, order.slots if of_slots else order.blocks)
        return report

    def _conclude(self, size: int, error: str, rank: int) -> PrefixReport:
        if error and rank:
            print(f"prefixes: {error}", flush=True)  # rank 0 alone reports to the router
        if self._agree is not None and not self._agree(0 if error else 1):
            error = error or "another rank could not, which its output explains"
        return PrefixReport(size, error)


def find_file(order: KeepOrder | RestoreOrder, rank: int) -> Path:
    """Return the path of a rank's file."""
    return order.folder / f"{order.key.hex()}-{rank}.prefixes"


def write_prefixes(path: Path, parts: PrefixParts, order: KeepOrder) -> int:
    """Write a file, or the next part of one, readable by its owner alone; returns its bytes.

    Only a file that is written at once is synced. Raises OSError, and ValueError if what is to be
    continued is another file.
    """
    own = list(parts.with_copies())
    items = np.array(order.blocks, np.int64), np.array(order.slots, np.int64)
    totals = [
        sum(counts) for counts in zip(order.before, map(len, items), order.behind, strict=True)
    ]
    head = _HEAD.pack(_MAGIC, order.key, *totals, len(own))
    flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if order.begins else 0)
    try:
        with open(os.open(path, flags, 0o600), "r+b") as file:
            checksums = [0] * len(own)
            if not order.begins:
                if file.read(_HEAD.size) != head:
                    raise ValueError(f"{path} is not what was begun")
                checksums = [row[2] for row in _PART.iter_unpack(file.read(_PART.size * len(own)))]
            size = at = len(head) + _PART.size * len(own)
            size = size if order.begins else 0
            rows = []
            for (part, copy, of_slots), checksum in zip(own, checksums, strict=True):
                width, some = part.item_bytes, items[of_slots]
                file.seek(at + order.before[of_slots] * width)
                checksum = _write(file, (part, copy), some, checksum)
                rows.append(_PART.pack(width, totals[of_slots], checksum))
                size, at = size + len(some) * width, at + totals[of_slots] * width
            file.seek(0)
            file.write(head + b"".join(rows))
            file.flush()
            if order.is_whole:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return size


def read_prefixes(path: Path, parts: PrefixParts, order: RestoreOrder) -> int:
    """Read a file's first blocks and slots; returns their bytes.

    Raises OSError, and ValueError if the file is of another order or memory, or damaged. Blocks may
    be half written then.
    """
    own = list(parts.with_copies())
    with open_file(path) as file:
        check_owner(path, os.fstat(file.fileno()))
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ValueError(f"{path} is cut off")
        magic, key, *kept, count = _HEAD.unpack(head)
        if magic != _MAGIC or key != order.key:
            raise ValueError(f"{path} was not written together with the index beside it")
        table = file.read(_PART.size * len(own))
        rows = list(_PART.iter_unpack(table)) if len(table) == _PART.size * len(own) else []
        if count != len(own) or [row[0] for row in rows] != [part.item_bytes for part, *_ in own]:
            raise ValueError(f"{path} is of a cache with other sizes")
        counts = (order.blocks, order.host_blocks), (order.slots, order.host_slots)
        if kept[0] < sum(counts[0]) or kept[1] < sum(counts[1]):
            raise ValueError(f"{path} has fewer blocks than the index beside it")
        size, at = 0, file.tell()
        for (part, copy, of_slots), (width, items, checksum) in zip(own, rows, strict=True):
            file.seek(at)
            wanted = counts[of_slots]
            if wanted[1] and copy is None:
                raise ValueError("this shard keeps no copies in the host's memory")
            if _read(file, (part, copy), wanted, items) != checksum:
                raise ValueError(f"{path} is damaged: a checksum differs")
            size, at = size + sum(wanted) * width, at + items * width
    return size


def _items_at_once(part: Part) -> int:
    return max(1, _AT_ONCE // max(1, part.item_bytes))


def _write(file: BinaryIO, parts: tuple[Part, Part | None], items: Ints, checksum: int) -> int:
    """Write items of a part, and of its copies; returns the CRC-32 of them behind those before."""
    (part, copy), step = parts, _items_at_once(parts[0])
    for begin in range(0, len(items), step):
        data = _take(part, copy, items[begin : begin + step])
        checksum = zlib.crc32(data.data, checksum)
        file.write(data.data)
    return checksum


def _take(part: Part, copy: Part | None, items: Ints) -> Bytes:
    """Return items of a part, uint8 [n, item_bytes]; -n: those in the host's places n.

    Raises OSError if there are no such places.
    """
    hosted = items < 0
    if not hosted.any():
        return part.take(items)
    if copy is None:
        raise OSError("this shard keeps no copies in the host's memory")
    data = np.empty((len(items), part.item_bytes), np.uint8)
    data[~hosted] = part.take(items[~hosted])
    data[hosted] = copy.take(-items[hosted])
    return data


def _read(file: Any, parts: tuple[Part, Part | None], wanted: tuple[int, int], items: int) -> int:
    """Read a part's first items of so many into it; returns the CRC-32 of all.

    `parts`: the part, and what has copies; `wanted`: how many of the first, and of those that
    follow, come to either.
    """
    (part, copy), (own, hosted) = parts, wanted
    checksum, step = 0, _items_at_once(part)
    for begin in range(0, items, step):
        data = np.empty((min(step, items - begin), part.item_bytes), np.uint8)
        if _fill(file, data.reshape(-1).data) < data.nbytes:
            raise ValueError(f"{file.name} is cut off")
        checksum = zlib.crc32(data.data, checksum)
        if begin < own:
            part.put(1 + begin, data[: own - begin])
        first = max(0, own - begin)
        behind = data[first : max(first, own + hosted - begin)]
        if copy is not None and len(behind):
            copy.put(1 + begin + first - own, behind)
    return checksum


def _fill(file: Any, room: memoryview) -> int:
    """Read until `room` is full or the file ends; returns the bytes read."""
    filled = 0
    while filled < len(room) and (count := file.readinto(room[filled:])):
        filled += count
    return filled


def _clear(part: Part, count: int) -> None:
    step = _items_at_once(part)
    for begin in range(0, count, step):
        size = min(step, count - begin)
        part.put(1 + begin, np.zeros((size, part.item_bytes), np.uint8))
