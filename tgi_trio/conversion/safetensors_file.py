"""Safetensors files, read and written tensor by tensor; a written file is complete or absent.

A file consists of the header's length (u64), the header as JSON and the tensors' bytes, without
gaps.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tgi_trio.conversion.floats import RAW, WIDENED, widen
from tgi_trio.conversion.pickle_machine import ITEM_SIZES
from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import open_file, parse_json

PIECE: Final = 2**24  # bytes written and compared at once


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written. `parts()` yields its bytes, little-endian and in row-major order."""

    name: str
    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]
    size: int  # bytes
    parts: Callable[[], Iterable[Any]]  # buffers of bytes


@dataclass(frozen=True)
class Layout:
    """The contents of a file to be written."""

    entries: Sequence[TensorEntry]  # in the order of their bytes
    header: bytes  # preceded by its length

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return len(self.header) + sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class SafetensorsFile:
    """A mapped file for reading."""

    path: Path
    table: Mapping[str, Any]  # name -> its entry of the header, in the order of the bytes
    data: mmap.mmap
    start: int  # of the tensors' bytes

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Map a file that safetensors' reader accepts; raises ModelLoadError."""
        try:
            with open_file(path) as file, safe_open(str(path), framework="np"):
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError, ValueError) as error:
            why = tell_reason(error, path)
            raise ModelLoadError(f"{path} cannot be read as safetensors: {why}") from error
        start = 8 + int.from_bytes(data[:8], "little")
        table = parse_json(data[8:start])
        table.pop("__metadata__", None)
        ordered = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
        return cls(path, dict(ordered), data, start)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of an unchanged tensor."""
        facts = self.table[name]
        size = facts["data_offsets"][1] - facts["data_offsets"][0]
        shape = tuple(facts["shape"])
        return TensorEntry(name, facts["dtype"], shape, size, lambda: [self._bytes(name)])

    def floats(self, name: str) -> NDArray[np.float32]:
        """Return a floating-point tensor as float32; raises ModelLoadError for other dtypes."""
        facts = self.table[name]
        if facts["dtype"] not in WIDENED:
            raise ModelLoadError(f"{name!r} in {self.path} is {facts['dtype']}, no float")
        raw = np.frombuffer(self._bytes(name), RAW[facts["dtype"]]).reshape(facts["shape"])
        return widen(raw, facts["dtype"])

    def _bytes(self, name: str) -> memoryview:
        begin, end = self.table[name]["data_offsets"]
        return memoryview(self.data)[self.start + begin : self.start + end]


def lay_out(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> Layout:
    """Return the layout of a file: larger dtypes first, so that all tensors are aligned."""
    ordered = sorted(entries, key=lambda entry: -ITEM_SIZES.get(entry.dtype, 1))
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for entry in ordered:
        place = [at, at + entry.size]
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": place,
        }
        at += entry.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(ordered, len(text).to_bytes(8, "little") + text)


def is_written(path: Path, layout: Layout) -> bool:
    """Return whether a file with exactly this layout exists, as `write_safetensors` leaves it."""
    try:
        with path.open("rb") as file:
            begins = file.read(len(layout.header)) == layout.header
        return begins and path.stat().st_size == layout.size
    except FileNotFoundError:
        return False


def write_safetensors(path: Path, layout: Layout) -> None:
    """Write a file, read it back and compare it before it gets its name.

    Raises ModelLoadError if the file on disk differs, and OSError.
    """
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(layout.header)
        for entry in layout.entries:
            for piece in _pieces(entry):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    _verify(part, layout)
    part.replace(path)


def _pieces(entry: TensorEntry) -> Iterator[memoryview]:
    for part in entry.parts():
        view = memoryview(part).cast("B")
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]


def _verify(path: Path, layout: Layout) -> None:
    """Compare a file with its layout by bytes, and check that safetensors' reader accepts it."""
    wrong = f"{path} differs from what was written to it: look at the disk"
    if path.stat().st_size != layout.size:
        raise ModelLoadError(wrong)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = len(layout.header)
        if data[:at] != layout.header:
            raise ModelLoadError(wrong)
        for entry in layout.entries:
            for piece in _pieces(entry):
                if data[at : at + len(piece)] != piece.tobytes():
                    raise ModelLoadError(wrong)
                at += len(piece)
    try:
        with safe_open(str(path), framework="np") as opened:
            names = set(opened.keys())
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is not accepted by safetensors: {error}") from error
    if names != {entry.name for entry in layout.entries}:
        raise ModelLoadError(wrong)
