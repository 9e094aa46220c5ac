"""Checks that the scales of quantised weights are finite, before anything loads them.

A file may be damaged, or malicious: a single NaN or infinite scale makes nonsense of every answer.
Scales in separate tensors are a small part of a checkpoint. GGUF's are in every block, so checking
them means reading the file: a tenth of a second of processor time per GB in memory, and from a disk
a start would wait for all of it. So of more than `_AT_MOST` bytes only samples are checked, evenly
spread over every tensor; loading checks all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.gguf.block_types import BY_NAME, has_scales

_AT_MOST: Final = 256 << 20  # bytes
_RUN: Final = 1 << 20  # most bytes of one sample
_PLACES: Final = 8  # least number of samples of a tensor that is not checked as a whole
_LEAST: Final = 4 << 10  # least bytes of a sample: files are read in pages
# Dtype of a scale -> its bits as an integer, and the bits that are all set in NaN or infinity.
_NONE: Final = {
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E8M0": ("u1", 0xFF),
    "F8_E4M3": ("u1", 0x7F),
}


def check_scales(tensors: Mapping[str, StoredTensor], at_most: int = _AT_MOST) -> None:
    """Raise ModelLoadError if a scale is infinite or NaN.

    `tensors`: scales, or blocks with scales. `at_most`: bytes to check.
    """
    of_file: dict[Path, list[str]] = {}
    for name, stored in tensors.items():
        of_file.setdefault(stored.file, []).append(name)
    every = max(1, math.ceil(sum(each.end - each.first for each in tensors.values()) / at_most))
    for path, names in of_file.items():
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            content = np.frombuffer(data, np.uint8)
            try:
                order = sorted(names, key=lambda name: tensors[name].first)
                runs = {name: list(_runs(tensors[name], every)) for name in order}
                # a mapped file that is touched at scattered places is read page by page
                if every > 1:
                    for first, end in chain.from_iterable(runs.values()):
                        os.posix_fadvise(file.fileno(), first, end - first, os.POSIX_FADV_WILLNEED)
                for name in order:
                    if _has_bad(content, tensors[name].dtype, runs[name]):
                        raise ModelLoadError(
                            f"Tensor {name!r} in {path} holds a scale that is infinite or not a "
                            "number: the file is damaged. Download it again."
                        )
            finally:
                del content  # or the mapping cannot be closed


def are_finite(blocks: NDArray[np.uint8], kind: str) -> bool:
    """Return whether all scales of blocks [count, bytes] of a GGUF type are finite."""
    block = BY_NAME[kind]
    return all(_finite(blocks[:, at:], block.scale) for at in block.scales)


def _runs(stored: StoredTensor, every: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a tensor's samples in its file: one part in `every`."""
    size = _row_bytes(stored.dtype)
    count = (stored.end - stored.first) // size
    run = count if every == 1 else count // every // _PLACES
    run = max(min(run, _RUN // size), _LEAST // size)
    for begin in range(0, count, run * every):
        yield stored.first + begin * size, stored.first + min(begin + run, count) * size


def _has_bad(content: NDArray[np.uint8], kind: str, runs: Iterable[tuple[int, int]]) -> bool:
    """Return whether a scale in a tensor's samples is not finite."""
    look, size = are_finite if has_scales(kind) else _finite, _row_bytes(kind)
    return not all(look(content[first:end].reshape(-1, size), kind) for first, end in runs)


def _row_bytes(kind: str) -> int:
    """Return the bytes of a block, or of a scale in a separate tensor."""
    return BY_NAME[kind].bytes if has_scales(kind) else np.dtype(_NONE[kind][0]).itemsize


def _finite(rows: NDArray[Any], kind: str) -> bool:
    """Return whether the first number of every row is finite."""
    bits, none = _NONE[kind]
    numbers = rows[:, : np.dtype(bits).itemsize].view(bits)
    return not bool(((numbers & none) == none).any())
