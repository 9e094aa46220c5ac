"""Reads files of `torch.save` without torch: descriptions of tensors, and their bytes' offsets.

There are two formats. Since torch 1.6, a file is a zip archive with members `<name>/data.pkl`, the
pickle, and `<name>/data/<key>`, the storages, all uncompressed. Before, it was a sequence of
pickles (magic number, version, machine, object, keys of the storages), followed by the storages,
each as its count (int64) and its elements.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from tgi_trio.conversion.pickle_machine import ITEM_SIZES, Tensor, run_pickle
from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import open_file

LARGEST_PICKLE: Final = 2**27  # bytes; a tensor takes a few hundred
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001
_LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")
_POINTER: Final = b"version https://git-lfs"


@dataclass(frozen=True)
class TorchFile:
    """An open file. `start` of a storage is its offset in `data`, in bytes."""

    path: Path
    tensors: Mapping[str, Tensor]  # by name, in the order of the state dict
    data: mmap.mmap
    start: Mapping[str, int]
    stored_bytes: int  # of all storages; overlaps count once

    def place(self, tensor: Tensor) -> int:
        """Return the offset of a tensor's first element in `data`."""
        return self.start[tensor.storage.key] + tensor.offset * ITEM_SIZES[tensor.dtype]


@contextmanager
def open_torch_file(path: Path) -> Iterator[TorchFile]:
    """Map a file written by `torch.save`; nothing in it is executed.

    Raises ModelLoadError for a file that contains anything but tensors by name, or tensors whose
    bytes it lacks.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context(open_file(path))
            size = path.stat().st_size
            if size == 0:
                raise ModelLoadError("it is empty")
            if file.read(len(_POINTER)) == _POINTER:
                raise ModelLoadError("it is a Git LFS pointer, not the file: run git lfs pull")
            # not closed here: views by numpy may remain after an error
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            read = _read_zip if zipfile.is_zipfile(file) else _read_sequence
            value, start, sizes = read(file, data)
            tensors = _state_dict(value)
            for name, tensor in tensors.items():
                _check(name, tensor, sizes)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path} cannot be converted: {error}") from error
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error
        yield TorchFile(path, tensors, data, start, min(size, sum(sizes.values())))


Found = tuple[Any, dict[str, int], dict[str, int]]  # object; starts and sizes of storages, in bytes


def _read_zip(file: BinaryIO, data: mmap.mmap) -> Found:
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ModelLoadError(f"its archive is damaged: {error}") from error
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ModelLoadError("it is a zip archive, but not one that torch.save writes")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in members:
        raise ModelLoadError("it is a TorchScript archive, which is code, not weights")
    if (order := members.get(f"{root}byteorder")) is not None:
        begin = _begin(order, data)
        if data[begin : begin + order.file_size] != b"little":
            raise ModelLoadError("it was written on a big-endian machine")
    if members[pickles[0]].file_size > LARGEST_PICKLE:
        raise ModelLoadError(f"its pickle is larger than {LARGEST_PICKLE / 2**20:.0f} MiB")
    begin = _begin(members[pickles[0]], data)
    value = run_pickle(io.BytesIO(data[begin : begin + members[pickles[0]].file_size]))
    prefix = f"{root}data/"
    storages = {n.removeprefix(prefix): m for n, m in members.items() if n.startswith(prefix)}
    starts = {key: _begin(member, data) for key, member in storages.items()}
    return value, starts, {key: member.file_size for key, member in storages.items()}


def _begin(member: zipfile.ZipInfo, data: mmap.mmap) -> int:
    """Return the offset of a member's bytes."""
    at, size = member.header_offset, member.file_size
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ModelLoadError(f"{member.filename} is compressed or encrypted in its archive")
    try:
        header = _LOCAL_HEADER.unpack_from(data, at)
    except struct.error:
        raise ModelLoadError(f"{member.filename} lies outside of its archive") from None
    begin: int = at + _LOCAL_HEADER.size + header[9] + header[10]  # the name's and extra's lengths
    if header[0] != b"PK\3\4" or begin + size > len(data):
        raise ModelLoadError(f"{member.filename} lies outside of its archive: it may be truncated")
    return begin


def _read_sequence(file: BinaryIO, data: mmap.mmap) -> Found:
    pickles = io.BytesIO(data[:LARGEST_PICKLE])
    try:
        first = run_pickle(pickles)
    except ModelLoadError as error:
        raise ModelLoadError(f"it is no file of torch.save: {error}") from error
    if first != _MAGIC:
        raise ModelLoadError("it is a pickle, but not one of torch.save")
    version, machine = run_pickle(pickles), run_pickle(pickles)
    if version != _VERSION or not isinstance(machine, dict) or not machine.get("little_endian"):
        raise ModelLoadError("it is of another version of torch.save, or of a big-endian machine")
    value, keys = run_pickle(pickles), run_pickle(pickles)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ModelLoadError("the list of its storages is damaged")
    storages = {tensor.storage.key: tensor.storage for tensor in _state_dict(value).values()}
    starts, sizes, at = {}, {}, pickles.tell()
    for key in keys:
        count = storages[key].count if key in storages else -1
        if data[at : at + 8] != struct.pack("<q", count):
            raise ModelLoadError(f"its storage {key:.40} is not where it should be: it is damaged")
        starts[key], sizes[key] = at + 8, count * ITEM_SIZES.get(storages[key].dtype, 1)
        at += 8 + sizes[key]
    if at > len(data):
        raise ModelLoadError(f"it is truncated: {at} bytes are promised, {len(data)} are there")
    return value, starts, sizes


def _state_dict(value: Any) -> dict[str, Tensor]:
    """Return the tensors by name; raises ModelLoadError that names anything else."""
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]  # trainers wrap it
    if not isinstance(value, dict):
        raise ModelLoadError(f"it holds no tensors by name, but a {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ModelLoadError(f"{name!r:.100} in it is no tensor, but of type {kind}")
    return value


def _check(name: str, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    """Raise ModelLoadError unless every element is within the tensor's storage."""
    storage, item = tensor.storage, ITEM_SIZES[tensor.dtype]
    size = sizes.get(storage.key)
    if size is None:
        raise ModelLoadError(f"the storage of {name!r:.100} is missing")
    if len(tensor.shape) != len(tensor.strides):
        raise ModelLoadError(f"{name!r:.100} has a shape and strides of unequal lengths")
    elements, here = element_count(tensor.shape), size // item
    steps = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((count - 1) * step for count, step in steps)
    if elements and (elements > here or last >= here):
        raise ModelLoadError(
            f"{name!r:.100} has {elements} elements up to place {last} of a storage of {here}"
        )


def element_count(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count
