"""The header of a GGUF file: metadata by key, and the place of each tensor.

    "GGUF", version u32, tensors u64, keys u64, the keys with their values, the tensors' names,
    shapes, types and places, padding, then the weights.

Everything is little-endian. Files may come from anyone, so every count and length is checked
against the bytes that are left, before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.gguf.block_types import BlockType, find_type
from tgi_trio.whole_files import open_file

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32  # of tensors, if the file does not state it
_LARGEST_ALIGNMENT: Final = 1 << 20
_LONGEST_HEADER: Final = 512 << 20  # bytes; the largest vocabularies take about ten megabytes
_MOST_ELEMENTS: Final = 1 << 24  # of a list
_MOST_DIMENSIONS: Final = 4
_SMALLEST_KEY: Final = 8 + 4 + 1  # bytes
_SMALLEST_TENSOR: Final = 8 + 4 + 8 + 4 + 8

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# formats of `struct`
_NUMBERS: Final = dict(enumerate("BbHhIif")) | {7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
# Keys with long lists, which are not needed for loading weights.
_VOCABULARY: Final = "tokenizer."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header's entry of one tensor."""

    kind: BlockType
    shape: tuple[int, ...]  # the last axis runs along a row, as everywhere but in the file
    first: int  # byte offset in the file
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file."""

    metadata: Mapping[str, Any]  # numbers, strings, and lists of either
    tensors: Mapping[str, TensorInfo]
    lists: Mapping[str, range]  # of float32: offsets of their elements in the file


def read_header(path: Path, *, vocabulary: bool = False) -> Header:
    """Read a file's header; `tokenizer.` keys only with `vocabulary`.

    Raises ModelLoadError for a file that is not GGUF, truncated or damaged, and for an unsupported
    type of tensor.
    """
    with refusing(path), open_file(path) as file:
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"its header cannot fit into {size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, min(size, _LONGEST_HEADER)), size, vocabulary)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn errors of reading into a ModelLoadError that names the file."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise ModelLoadError(
            f"{path} cannot be read as GGUF: {tell_reason(error, path)}."
        ) from error


class _Cursor:
    """A position in the header. Methods advance it, and raise ValueError if bytes are missing."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self.place = 0

    @property
    def left(self) -> int:
        return self._end - self.place

    def skip(self, count: int) -> int:
        """Skip `count` bytes; return the position before them."""
        if not 0 <= count <= self.left:
            raise ValueError(
                f"it is truncated or damaged: {count} bytes are to follow at {self.place}, and "
                f"{self.left} do"
            )
        begin = self.place
        self.place += count
        return begin

    def take(self, kind: struct.Struct) -> Any:
        return kind.unpack_from(self._data, self.skip(kind.size))[0]

    def string(self) -> str:
        length = self.take(_U64)
        begin = self.skip(length)
        return self._data[begin : begin + length].decode("utf-8", errors="replace")

    def value(self, kind: int, kept: bool) -> Any:
        """Return a value, or None for a list unless `kept`."""
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            return self.take(_number(kind))
        element, count = self.take(_U32), self.take(_U64)
        if element != _STRING:
            number = _number(element)
            self._check_count(count, number.size)
            begin = self.skip(count * number.size)
            format_of = f"<{count}{_NUMBERS[element]}"
            return list(struct.unpack_from(format_of, self._data, begin)) if kept else None
        self._check_count(count, _U64.size)
        return self._strings(count, kept)

    def _strings(self, count: int, kept: bool) -> list[str] | None:
        """Return the strings of a list, or None unless `kept`.

        A vocabulary has hundreds of thousands, so the loop makes as few calls as possible.
        """
        data, end, place = self._data, self._end, self.place
        size, length_at = _U64.size, _U64.unpack_from
        found: list[bytes] = []
        for _ in range(count):
            begin = place + size
            if begin > end or begin + (length := length_at(data, place)[0]) > end:
                self.place = place
                self.string()  # which raises the error
            place = begin + length
            if kept:
                found.append(data[begin:place])
        self.place = place
        return [text.decode("utf-8", "replace") for text in found] if kept else None

    def _check_count(self, count: int, size: int) -> None:
        if count > min(_MOST_ELEMENTS, self.left // size):
            raise ValueError(f"it is truncated or damaged: a list cannot have {count} elements")


def _number(kind: int) -> struct.Struct:
    if kind not in _NUMBERS:
        raise ValueError(f"it is damaged: there are no values of type {kind} (in lists)")
    return struct.Struct(f"<{_NUMBERS[kind]}")


def _read(cursor: _Cursor, size: int, vocabulary: bool) -> Header:
    tensor_count, key_count = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    lists: dict[str, range] = {}
    for _ in range(key_count):
        name, kind = cursor.string(), cursor.take(_U32)
        if name in metadata:
            raise ValueError(f"its key {name!r} is there twice")
        begin = cursor.place + _U32.size + _U64.size  # of a list's elements
        value = cursor.value(kind, vocabulary or not name.startswith(_VOCABULARY))
        metadata[name] = value
        if isinstance(value, list) and all(type(each) is float for each in value):
            places = range(begin, cursor.place, 4)
            if len(places) == len(value):  # not float64
                lists[name] = places
    infos: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name, info = _read_tensor(cursor)
        if name in infos:
            raise ValueError(f"its tensor {name!r} is there twice")
        infos[name] = info
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    _check_alignment(alignment)
    begin = -(-cursor.place // alignment) * alignment
    tensors = {
        name: _place(name, *info, begin=begin, alignment=alignment, size=size)
        for name, info in infos.items()
    }
    _check_overlaps(tensors)
    kept = {name: value for name, value in metadata.items() if value is not None}
    return Header(kept, tensors, lists)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(struct.Struct("4s"))
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.take(_U32)
    if version not in _VERSIONS:
        what = "big-endian" if version >> 16 else f"of version {version}"
        raise ValueError(f"it is {what}; read are the little-endian versions 2 and 3")
    tensor_count, key_count = cursor.take(_U64), cursor.take(_U64)
    if tensor_count * _SMALLEST_TENSOR + key_count * _SMALLEST_KEY > cursor.left:
        raise ValueError(
            f"it is truncated or damaged: {tensor_count} tensors and {key_count} keys do not fit"
        )
    return tensor_count, key_count


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[BlockType, tuple[int, ...], int]]:
    """Return name, type, shape and offset of the next tensor."""
    name, dimensions = cursor.string(), cursor.take(_U32)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"its tensor {name!r} cannot have {dimensions} dimensions")
    shape = tuple(cursor.take(_U64) for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise ValueError(f"its tensor {name!r} is empty")
    try:
        kind = find_type(cursor.take(_U32))
    except ValueError as error:
        raise ValueError(f"its tensor {name!r} is of {error}") from None
    return name, (kind, shape, cursor.take(_U64))


def _check_alignment(alignment: Any) -> None:
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"its tensors cannot be aligned to {alignment!r} bytes")


def _place(
    name: str,
    kind: BlockType,
    shape: tuple[int, ...],
    offset: int,
    *,
    begin: int,
    alignment: int,
    size: int,
) -> TensorInfo:
    if shape[-1] % kind.weights:
        raise ValueError(
            f"its tensor {name!r} has rows of {shape[-1]} weights, and {kind.name} blocks of "
            f"{kind.weights}"
        )
    if offset % alignment:
        raise ValueError(f"its tensor {name!r} is not aligned to {alignment} bytes")
    first = begin + offset
    end = first + math.prod(shape) // kind.weights * kind.bytes
    if end > size:
        raise ValueError(
            f"it is truncated: tensor {name!r} ends at byte {end}, the file at {size}. Download "
            "it again"
        )
    return TensorInfo(kind, shape, first, end)


def _check_overlaps(tensors: Mapping[str, TensorInfo]) -> None:
    last = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].first):
        if info.first < last:
            raise ValueError(f"its tensor {name!r} lies within another")
        last = info.end
