"""Finds matrices that were trained as a whole, before a shard is there.

Beside others an adapter is served whose saved embedding or head differs from the model's in few
rows. All rows are compared when it is loaded; here some are, evenly spread: those of a matrix that
was trained without further ado differ everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import Adapter, SavedMatrix
from tgi_trio.model.adapters.rows import explain_many_rows
from tgi_trio.model.adapters.sites import Changes
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.specs.decoder import DecoderSpec

_PLACES: Final = 4  # rows that are looked at for each that may differ
_KINDS: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}

Floats = NDArray[np.float32]


def check_saved(
    adapter: Adapter, changes: Changes, config: ModelConfig, spec: DecoderSpec, most: int
) -> None:
    """Raise ModelLoadError if a matrix that is saved whole differs in more than `most` rows.

    `config`: of the base, whose weights are read if they are plain numbers. Of a matrix that is not
    refused as many rows may differ nevertheless.
    """
    if not changes.compares:
        return
    tensors = read_tensors(config)
    for saved, matrix in _list_saved(changes, spec):
        name = matrix.name.removeprefix(spec.names.base)
        stored = tensors.get(matrix.name) or tensors.get(name)
        plain = stored is not None and stored.change is None and not matrix.transposed
        if stored is None or not plain or stored.dtype not in _KINDS:
            continue
        if stored.shape != (matrix.rows, matrix.columns):
            continue  # the shard says so
        if _count_changes(saved.matrix, stored, most) > most:
            raise ModelLoadError(explain_many_rows(adapter, saved, most))


def _list_saved(changes: Changes, spec: DecoderSpec) -> Iterator[tuple[SavedMatrix, MatrixRef]]:
    """Yield the matrices that are saved whole, each with the model's."""
    if isinstance(changes.embedded, SavedMatrix):
        yield changes.embedded, outer_refs(spec).embedding.pieces[0].matrix
    for adapted in changes.linears.values():
        if isinstance(adapted.rows, SavedMatrix):
            yield adapted.rows, adapted.linear.pieces[0].matrix


def _count_changes(copy: StoredTensor, stored: StoredTensor, most: int) -> int:
    """Return how many of some rows of `copy` differ from those of a matrix; no more are counted
    than one beyond `most`."""
    rows = min(copy.shape[0], stored.shape[0])
    every = max(1, rows // (_PLACES * (most + 1)))
    count = 0
    with _opened(copy) as copied, _opened(stored) as own:
        for row in range(0, rows, every):
            theirs = _read_row(own, stored, row)
            count += not np.array_equal(
                _read_row(copied, copy, row), _rounded(theirs, copy.dtype), equal_nan=True
            )
            if count > most:
                break
    return count


def _opened(tensor: StoredTensor) -> mmap:
    with tensor.file.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_READ)


def _read_row(content: mmap, tensor: StoredTensor, row: int) -> Floats:
    kind, width = np.dtype(_KINDS[tensor.dtype]), tensor.shape[1]
    first = tensor.first + row * width * kind.itemsize
    raw = np.frombuffer(content[first : first + width * kind.itemsize], kind)
    return _widen(raw, tensor.dtype)


def _widen(raw: NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return raw.astype(np.float32)


def _rounded(values: Floats, dtype: str) -> Floats:
    """Return numbers as a copy in another dtype has them."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return _widen(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), dtype)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values
