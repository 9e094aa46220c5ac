"""Heads that config.json ties to the embedding, and that the checkpoint has with other values.

Some trainers store a head of its own and leave `tie_word_embeddings` as it was. transformers then
ties the two only where their values are equal, and warns otherwise (`tie_weights` in
`modeling_utils.py`); so is it here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor, read_headers, stored_names
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.published_names import rename_family
from tgi_trio.model.specs.decoder import DecoderSpec

WARNING: Final = (
    "config.json ties the head to the embedding (`tie_word_embeddings`), but the checkpoint has a "
    "head with other values, which is used: write false there, and this is said no more"
)
# Endings of what holds a matrix's numbers, quantised or not: `model/quantised/` has the others.
_NUMBERS: Final = ("weight", "qweight", "q_weight", "trellis", "weight_packed", "W_q", "B")
_TORCHAO: Final = "qdata"
_SLICE: Final = 1 << 20  # bytes that are compared at once


def fit_head(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` with a head of its own if the checkpoint has one that differs.

    Equal copies stay tied. Without weights `spec` is returned unchanged: code that needs them will
    report it.
    """
    if not spec.tied_head:
        return spec
    try:
        head = _parts(stored_names(config.folder), spec, spec.names.head)
        if not any(end in _NUMBERS or end.endswith(_TORCHAO) for end in head):
            return spec  # most checkpoints: only names have been read
        tensors = read_headers(config.folder)
        table = _parts(tensors, spec, spec.names.embedding)
        same = not table or _are_equal(
            {end: tensors[name] for end, name in head.items()},
            {end: tensors[name] for end, name in table.items()},
        )
    except (ModelLoadError, OSError):
        return spec
    return replace(spec, tied_head=same)


def _parts(names: Iterable[str], spec: DecoderSpec, of: str) -> dict[str, str]:
    """Return ending -> stored name of the tensors of a matrix, without its bias."""
    places = {f"{of}.", f"{of}.".removeprefix(spec.names.base)}
    return {
        ours.removeprefix(place): stored
        for ours, stored in rename_family({name: name for name in names}, spec.family).items()
        for place in places
        if ours.startswith(place) and not ours.endswith(".bias")
    }


def _are_equal(one: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]) -> bool:
    """Return whether two matrices are stored in the same way, to the byte."""
    return one.keys() == other.keys() and all(
        _is_same(tensor, other[end], *map(_read_stamp, (tensor, other[end])))
        for end, tensor in one.items()
    )


def _read_stamp(tensor: StoredTensor) -> tuple[int, int]:
    """Return what changes when the tensor's file does."""
    stat = tensor.file.stat()
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)  # a start asks several times, and equal ones are read to their end
def _is_same(
    one: StoredTensor, other: StoredTensor, stamp: tuple[int, int], other_stamp: tuple[int, int]
) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes; raises OSError."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        for place in range(0, one.end - one.first, _SLICE):
            count = min(_SLICE, one.end - one.first - place)
            wanted = os.pread(left.fileno(), count, one.first + place)
            if wanted != os.pread(right.fileno(), count, other.first + place):
                return False
    return True
