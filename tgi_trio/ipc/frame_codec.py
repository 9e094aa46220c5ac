"""Encodes frames as columns in the layout of `frames.SPECS`, and decodes them in place."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import compress
from operator import is_not, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import CorruptFrame
from tgi_trio.ipc.frames import SPECS, WORD, FrameKind

_NUMBER = struct.Struct("<Q")  # of the kind, by which a frame begins
_PADDING = tuple(b"\0" * n for n in range(WORD))


def encode_path(path: Path) -> NDArray[np.uint8]:
    """Return a path as a u1 column: the bytes by which the system knows it, UTF-8 or not."""
    return np.frombuffer(os.fsencode(path), np.uint8)


def frame_bytes(kind: FrameKind, **counts: int) -> int:
    """Return how many bytes a frame with these counts has."""
    spec = SPECS[kind]
    sizes = (counts[column.per] * np.dtype(column.dtype).itemsize for column in spec.columns)
    return spec.header_bytes + sum(-(-size // WORD) * WORD for size in sizes)


def encode(kind: FrameKind, words: Mapping[str, int], columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the frame as bytes.

    Columns that are left out are empty. Counts are taken from the arrays.
    Raises ValueError when a name is unknown, a word is missing, or columns of one count differ
    in length.
    """
    spec = SPECS[kind]
    values = [words[name] for name, _ in spec.words]
    first_count = 1 + len(values)
    counts = [-1] * len(spec.counts)
    parts: list[Any] = [b""]  # bytes and arrays: what gives its memory as a buffer
    used = 0
    for name, dtype, count_at in spec.plan:
        array = columns.get(name)
        length = 0 if array is None else len(array)
        expected = counts[count_at - first_count]
        if length != expected:
            if expected >= 0:
                raise ValueError(f"{kind.name}.{name}: {length} items, expected {expected}")
            counts[count_at - first_count] = length
        if array is None:
            continue
        used += 1
        if array.dtype is not dtype and array.dtype != dtype:
            array = array.astype(dtype)
        parts.append(array)
        if array.nbytes & 7:
            parts.append(_PADDING[-array.nbytes & 7])
    if used != len(columns):
        raise ValueError(f"{kind.name} has no column {sorted(columns.keys())}")
    parts[0] = spec.header.pack(kind, *values, *counts)
    try:
        return b"".join(parts)  # reads the arrays through the buffer protocol: one copy, not two
    except TypeError:  # an array that is not contiguous
        return b"".join([p if isinstance(p, bytes) else p.tobytes() for p in parts])


@lru_cache(maxsize=1024)
def _row_type(kind: FrameKind, counts: tuple[int, ...], size: int) -> np.dtype[Any]:
    """Return the structured dtype of a whole frame; raises CorruptFrame unless it has `size`.

    Cached, since frames of steady decoding have the same counts step after step.
    """
    spec = SPECS[kind]
    first_count = 1 + len(spec.words)
    offset = spec.header_bytes
    formats, offsets = [], []
    for _, dtype, count_at in spec.plan:
        count = counts[count_at - first_count]
        formats.append((dtype, count))
        offsets.append(offset)
        offset += -(-count * dtype.itemsize // WORD) * WORD
    if offset != size:
        raise CorruptFrame(f"{kind.name}: counts say {offset} bytes, frame has {size}")
    return np.dtype(
        {
            "names": [name for name, _, _ in spec.plan],
            "formats": [(dtype, (count,)) for dtype, count in formats],
            "offsets": offsets,
            "itemsize": size,
        }
    )


class FrameTemplate:
    """Encodes frames of equal counts one after the other, writing only what has changed.

    The bytes are those of `encode`.
    """

    def __init__(self, kind: FrameKind, frame: bytes, columns: Mapping[str, NDArray[Any]]) -> None:
        """Begin with a frame of these columns, as `encode` returns it."""
        spec = SPECS[kind]
        names = [name for name, _ in spec.words]
        self._find_words = itemgetter(*names)
        self._words = struct.Struct(f"<{len(names)}Q")
        self._bytes = bytearray(frame)
        first, counts_at = WORD * (1 + len(names)), spec.header_bytes
        counts = tuple(memoryview(self._bytes)[first:counts_at].cast("Q"))
        every = np.ndarray((), _row_type(kind, counts, len(self._bytes)), self._bytes)
        self._names = tuple(columns)
        self._columns = [every[name] for name in columns]
        self._lengths = [len(array) for array in columns.values()]
        # The read-only arrays whose bytes are in the frame; None: writable, so it may have changed.
        self._there = [fixed_array(array) for array in columns.values()]

    def encode(self, words: Mapping[str, int], columns: Mapping[str, NDArray[Any]]) -> bytes | None:
        """Return the frame as bytes; None if the columns, their order or the counts are others.

        A column that is the same read-only array as in the last frame is not written again. Raises
        KeyError if a word is missing.
        """
        if tuple(columns) != self._names:
            return None
        arrays, there = list(columns.values()), self._there
        for place in compress(range(len(arrays)), map(is_not, arrays, there)):
            array = arrays[place]
            there[place] = None
            if len(array) != self._lengths[place]:
                return None
            self._columns[place][...] = array
            if not array.flags.writeable:
                there[place] = fixed_array(array)
        self._words.pack_into(self._bytes, WORD, *self._find_words(words))
        return bytes(self._bytes)


def fixed_array(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the array if it and its base are read-only; None otherwise."""
    if array.flags.writeable:
        return None
    base = array.base
    return None if isinstance(base, np.ndarray) and base.flags.writeable else array


class Frame:
    """A decoded frame: words as ints, columns as read-only numpy views into the ring.

    The views alias the ring and are valid until the reader releases the frame; copy what must live
    longer (`.copy()`, `.tolist()`). `column(...)` is cheap.
    """

    __slots__ = ("_columns", "_words", "kind", "spec")

    def __init__(self, view: memoryview) -> None:
        """Check `view` (u8, the whole frame) against the table; raises CorruptFrame."""
        size = len(view)
        if size < WORD or size % WORD:
            raise CorruptFrame(f"a frame of {size} bytes is not a whole number of words")
        number = _NUMBER.unpack_from(view)[0]
        spec = SPECS.get(number)
        if spec is None:
            raise CorruptFrame(f"unknown frame kind {number}")
        if size < spec.header_bytes:
            raise CorruptFrame(f"{spec.kind.name}: {size} bytes, header is {spec.header_bytes}")
        self.kind = spec.kind
        self.spec = spec
        self._words = words = spec.header.unpack_from(view)
        counts = words[1 + len(spec.words) :]
        self._columns = np.ndarray((), _row_type(spec.kind, counts, size), view)

    def word(self, name: str) -> int:
        """Return a word or count by name."""
        value: int = self._words[self.spec.word_index[name]]
        return value

    def words(self) -> tuple[Any, ...]:
        """Return all words, without the counts, in the order of the table."""
        return self._words[1 : 1 + len(self.spec.words)]

    def lists(self) -> list[Any]:
        """Return every column as a list of its own, in the order of the table."""
        columns, words = self._columns, self._words
        # Of most frames most columns are empty, and a view of nothing takes as long as any.
        return [columns[name].tolist() if words[at] else [] for name, _, at in self.spec.plan]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column as a numpy view of the ring."""
        column: NDArray[Any] = self._columns[name]
        return column

    def text(self, name: str) -> str:
        """Return a u1 column as UTF-8 text; broken bytes are replaced, never raised."""
        return self.column(name).tobytes().decode("utf-8", "replace")

    def path(self, name: str) -> Path:
        """Return a u1 column as the path that `encode_path` wrote."""
        return Path(os.fsdecode(self.column(name).tobytes()))
