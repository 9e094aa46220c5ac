"""Converts a folder of pickles to safetensors beside them, without torch, without executing any.

Every file is first written, compared and renamed in a staging folder (`STAGING`); after an
interruption, the next conversion does not repeat the files that are finished there. At the end all
of them are moved to the model's folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.conversion.folder import (
    INDEX,
    NEW_INDEX,
    SOURCE,
    STAGING,
    conversion_due,
    find_pickles,
    identity,
    read_index,
    target_name,
)
from tgi_trio.conversion.pickle_machine import ITEM_SIZES, Tensor
from tgi_trio.conversion.safetensors_file import (
    Layout,
    TensorEntry,
    is_written,
    lay_out,
    write_safetensors,
)
from tgi_trio.conversion.torch_file import TorchFile, element_count, open_torch_file
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_values

Say = Callable[[str], None]
MOST_TIMES: Final = 4  # limit of a storage's copies: views may overlap, but must not fill the disk
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def convert_folder(folder: Path, say: Say) -> None:
    """Convert a folder's pickles; calls `say` for every file.

    Returns at once if there is nothing to convert, after waiting for another process's conversion.
    Raises ModelLoadError, and OSError if the folder is not writable.
    """
    with _lock_folder(folder):
        if not conversion_due(folder):
            return
        staging = folder / STAGING
        staging.mkdir(exist_ok=True)
        try:
            _convert(folder, staging, say)
        finally:
            if not any(staging.glob("*.safetensors")):
                shutil.rmtree(staging)


def _convert(folder: Path, staging: Path, say: Say) -> None:
    files = find_pickles(folder)
    targets = {file: target_name(file) for file in files}
    if len(set(targets.values())) < len(files):
        raise ModelLoadError(f"{folder} holds two pickles that would become one file")
    tied = _is_tied(folder)
    where: dict[str, str] = {}  # tensor -> file
    dropped: set[str] = set()  # names of tensors that are stored under another
    total = 0
    for number, file in enumerate(files, 1):
        with open_torch_file(file) as source:
            kept, again = _names(source, tied)
            layout = _layout(source, kept, {**again, SOURCE: identity(file)})
            if both := where.keys() & kept.keys():
                raise ModelLoadError(f"{min(both)!r} is in two files of {folder}")
            where |= dict.fromkeys(kept, targets[file])
            dropped |= again.keys()
            total += sum(entry.size for entry in layout.entries)
            if not any(is_written(at / targets[file], layout) for at in (folder, staging)):
                _check_space(folder, layout.size)
                say(f"converting {file.name}, {number} of {len(files)} ({layout.size:,} bytes)")
                write_safetensors(staging / targets[file], layout)
    _check_index(folder, where.keys() | dropped)
    _publish(folder, staging, where if len(files) > 1 else {}, total)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against other conversions, after waiting for a running one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_tied(folder: Path) -> bool:
    """Return whether a model needs a tensor with two names only once; if not, it needs both."""
    try:
        config = read_values(folder)
    except ModelLoadError:
        return False
    return config is not None and bool(config.get("tie_word_embeddings", True))


def _names(source: TorchFile, tied: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors to write, and the omitted names with the names that replace them.

    Of a tensor's names the first is kept: a state dict has modules in the order of their creation,
    embeddings before tied heads.
    """
    kept: dict[str, Tensor] = {}
    again: dict[str, str] = {}
    first: dict[Tensor, str] = {}
    for name, tensor in source.tensors.items():
        if name == "__metadata__":
            raise ModelLoadError(f"{source.path} names a tensor __metadata__, which is reserved")
        if tied and tensor in first and element_count(tensor.shape):
            again[name] = first[tensor]
        else:
            kept[name] = tensor
            first.setdefault(tensor, name)
    claimed = sum(element_count(t.shape) * ITEM_SIZES[t.dtype] for t in kept.values())
    if claimed > MOST_TIMES * source.stored_bytes:
        raise ModelLoadError(
            f"the tensors of {source.path} overlap: they claim {claimed:,} bytes of "
            f"{source.stored_bytes:,}"
        )
    return kept, again


def _layout(
    source: TorchFile, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Layout:
    return lay_out(
        (
            TensorEntry(
                name,
                tensor.dtype,
                tensor.shape,
                element_count(tensor.shape) * ITEM_SIZES[tensor.dtype],
                partial(_bytes_of, source, tensor),
            )
            for name, tensor in tensors.items()
        ),
        metadata,
    )


def _bytes_of(source: TorchFile, tensor: Tensor) -> Iterator[Any]:
    """Yield a tensor's bytes in row-major order."""
    if element_count(tensor.shape):
        yield np.ascontiguousarray(view_strided(source, tensor)).reshape(-1)


def view_strided(source: TorchFile, tensor: Tensor) -> NDArray[Any]:
    """Return a non-empty tensor as stored: a strided view with elements as unsigned integers."""
    item = ITEM_SIZES[tensor.dtype]
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    flat = np.frombuffer(source.data, _UNSIGNED[item], span, source.place(tensor))
    steps = [step * item for step in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"{folder} has {free:,} bytes free, and the next file needs {needed:,}: make room, or "
            "copy the model to a larger disk"
        )


def _check_index(folder: Path, found: Set[str]) -> None:
    if missing := sorted(read_index(folder / INDEX).keys() - found):
        raise ModelLoadError(
            f"{folder / INDEX} names {missing[0]!r}, which is in none of its files"
        )


def _publish(folder: Path, staging: Path, where: Mapping[str, str], total: int) -> None:
    """Move finished files to their places, the index first.

    In between, readers see an index with missing files, or parts of different conversions: both
    count as an unfinished conversion.
    """
    if where:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        part = staging / NEW_INDEX
        part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / NEW_INDEX)
    for path in sorted(staging.glob("*.safetensors")):
        path.replace(folder / path.name)
