"""Recognises a folder's kind of speculator, its base model, and its parts.

A kind is a row of `KINDS` and a file that reads its tensors' names; a file in `shard/speculation/`
drafts with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor, read_headers
from tgi_trio.model.config import read_values
from tgi_trio.model.speculators.assistant import is_assistant, read_assistant
from tgi_trio.model.speculators.eagle import (
    find_names,
    is_eagle3,
    read_draft_tokens,
    read_eagle3,
    read_verifier,
)
from tgi_trio.model.speculators.eagle_one import is_eagle_one, read_eagle_one
from tgi_trio.model.speculators.medusa import is_medusa, read_medusa
from tgi_trio.model.speculators.mlp import is_mlp, read_mlp
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.model.speculators.token_map import check_token_map

_NUMBERS: Final = ("F32", "F16", "BF16", "F64")


class _Read(Protocol):
    def __call__(
        self,
        folder: Path,
        values: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        *,
        hidden: int,
        vocabulary: int,
    ) -> HeadsSpec: ...


@dataclass(frozen=True, slots=True)
class SpeculatorKind:
    """A kind of heads."""

    word: str  # TGI's name, for errors
    claims: Callable[[Mapping[str, Any], Path], bool]
    read: _Read
    count: tuple[str, ...]  # keys of config.json that state the number of heads
    goes_on: bool = False  # it continues from its own drafts, for as many as are requested
    reads_kv: bool = False  # it reads the model's own keys and values


KINDS: Final = (
    SpeculatorKind("medusa", is_medusa, read_medusa, ("medusa_num_heads", "num_heads")),
    SpeculatorKind("mlp_speculator", is_mlp, read_mlp, ("n_predict",)),
    SpeculatorKind("eagle3", is_eagle3, read_eagle3, (), goes_on=True),
    SpeculatorKind("eagle", is_eagle_one, read_eagle_one, (), goes_on=True),
    SpeculatorKind(
        "gemma4_assistant", is_assistant, read_assistant, (), goes_on=True, reads_kv=True
    ),
)
SERVED: Final = (
    "Medusa heads (V1, V2, vLLM's), MLP speculators, EAGLE and EAGLE-3 drafters, Gemma 4's "
    "assistants, models with the same tokenizer"
)


def find_kind(folder: Path) -> SpeculatorKind | None:
    """Return the kind of heads in a folder, or None.

    Raises ModelLoadError for an unsupported kind of speculator, listing the supported ones.
    """
    values = read_values(folder) if folder.is_dir() else None
    if values is None:
        return None
    found = next((kind for kind in KINDS if kind.claims(values, folder)), None)
    if found is None and (words := find_names(values, "eagle")):
        raise ModelLoadError(
            f"{folder} holds an EAGLE speculator ({words[0]}), which is not served; served are "
            f"{SERVED}"
        )
    return found


def base_of_heads(folder: Path) -> str:
    """Return the name of the heads' base model; raises ModelLoadError if there is none."""
    values = read_values(folder) or {}
    name = values.get("base_model_name_or_path") or read_verifier(values)
    if not isinstance(name, str) or not name:
        raise ModelLoadError(
            f"{folder / 'config.json'} does not say which model its heads draft for: write it "
            "there as base_model_name_or_path, or name the model with --model-id and the heads "
            "with --draft-model"
        )
    return name


def count_drafts(folder: Path, requested: int | None) -> int:
    """Return how many tokens heads draft ahead: `requested`, or the number of heads.

    Raises ConfigurationError, in TGI's words, if more are requested.
    """
    have = count_heads(folder)
    if requested is not None and requested > have and not _need_kind(folder).goes_on:
        raise ConfigurationError(
            f"Speculate is set to `{requested}` but this {_need_kind(folder).word} models only has "
            f"`{have}` heads, please make them match: `speculate` and `draft_model`"
        )
    return have if requested is None else requested


def count_heads(folder: Path) -> int:
    """Return the number of heads that config.json states, 0 if it states none.

    For a drafter that continues from its drafts, the default number of drafts.
    """
    kind, values = _need_kind(folder), read_values(folder) or {}
    keys = kind.count
    if kind.goes_on:
        return read_draft_tokens(values)
    return next((values[key] for key in keys if isinstance(values.get(key), int)), 0)


def read_heads(folder: Path, *, hidden: int, vocabulary: int) -> HeadsSpec:
    """Return a folder's heads, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError for a tensor that is missing, has another shape or is quantised, and for
    heads that were made for another model.
    """
    kind, values = _need_kind(folder), read_values(folder) or {}
    tensors = read_headers(folder)
    spec = kind.read(folder, values, tensors, hidden=hidden, vocabulary=vocabulary)
    for name in spec.tensors:
        if name not in tensors:
            raise ModelLoadError(f"Tensor {name!r} is missing from the heads in {folder}.")
    _check_shapes(spec, tensors, hidden, vocabulary)
    heads = (ref.pieces[0].matrix.rows for role, ref in spec.linears.items() if "head" in role)
    check_token_map(spec, tensors, rows=next(heads, vocabulary), vocabulary=vocabulary)
    return spec


def _need_kind(folder: Path) -> SpeculatorKind:
    """Return the kind of heads in a folder; raises ModelLoadError if there is none."""
    kind = find_kind(folder)
    if kind is None:
        raise ModelLoadError(f"{folder} holds no heads; served are {SERVED}")
    return kind


def _check_shapes(
    spec: HeadsSpec, tensors: Mapping[str, StoredTensor], hidden: int, vocabulary: int
) -> None:
    refs = [piece.matrix for ref in spec.linears.values() for piece in ref.pieces]
    shapes: dict[str, tuple[int, ...]] = {
        ref.name: (ref.rows, ref.columns) for ref in (*refs, *spec.tables.values())
    }
    shapes |= {ref.bias: (ref.rows,) for ref in refs if ref.bias}
    shapes |= {name: (size,) for name, size in spec.vectors.values()}
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape:
            raise ModelLoadError(
                f"Tensor {name!r} in {found.file} has shape {list(found.shape)}, but heads of this "
                f"model, of {hidden} hidden features and {vocabulary} tokens, need {list(shape)}."
            )
        if found.dtype not in _NUMBERS:
            raise ModelLoadError(
                f"Tensor {name!r} in {found.file} is of type {found.dtype}; served are "
                f"{', '.join(_NUMBERS)}."
            )
