"""The token ids of the rows of a drafter's own head, checked before anything is loaded."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.speculators.spec import HeadsSpec

_CODES: Final = {"I64": "q", "I32": "i", "I16": "h"}  # of the module `array`


def check_token_map(
    spec: HeadsSpec, tensors: Mapping[str, StoredTensor], *, rows: int, vocabulary: int
) -> None:
    """Raise ModelLoadError for a map [rows] that is not a list of the model's tokens."""
    if not spec.token_map:
        return
    found = tensors[spec.token_map]
    if found.shape != (rows,):
        raise ModelLoadError(
            f"Tensor {spec.token_map!r} in {found.file} has shape {list(found.shape)}, but the "
            f"head has {rows} rows."
        )
    if found.dtype not in _CODES:
        raise ModelLoadError(
            f"Tensor {spec.token_map!r} in {found.file} is of type {found.dtype}; token ids are "
            f"one of {', '.join(_CODES)}."
        )
    numbers = array(_CODES[found.dtype])
    with found.file.open("rb") as file:
        file.seek(found.first)
        numbers.frombytes(file.read(found.end - found.first))
    if sys.byteorder == "big":
        numbers.byteswap()
    ids = [i + own for i, own in enumerate(numbers)] if spec.maps_by_offset else numbers
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ModelLoadError(
            f"{spec.token_map!r} in {spec.folder} names tokens {min(ids)} to {max(ids)}; the "
            f"model has 0 to {vocabulary - 1}."
        )
