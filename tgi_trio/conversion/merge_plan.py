"""Which tensors of a base an adapter changes, and whether its head can go on being its embedding.

Many models have no head of their own: it *shares* the embedding's weights (`tie_word_embeddings`).
PEFT lets an adapter change one of the two. The merged model computes what PEFT computes with the
adapter beside the model, so it has a head of its own then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tgi_trio.conversion.adapter_changes import Change, Kind
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import AdapterConfig

_HEAD: Final = "lm_head"
# Embeddings that a head may share, and what the head is called when it is apart.
_HEADS: Final[Mapping[str, str]] = {
    "model.embed_tokens.weight": "lm_head.weight",
    "embed_tokens.weight": "lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "wte.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "language_model.lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class NewHead:
    """A head of its own for a base whose head is its embedding."""

    name: str
    change: Change  # of the embedding's tensor as it is in the base


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What becomes of a base's tensors."""

    changes: Mapping[str, Change]  # by the names of the base's tensors
    embedding: str | None  # the name of its tensor
    head: NewHead | None
    tokens: int | None  # rows of the embedding, where there are others than before


def plan_merge(
    config: AdapterConfig,
    changes: Sequence[Change],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    unties: bool,
) -> MergePlan:
    """Return what becomes of a base with tensors of these `shapes`.

    `unties`: the base's family may have a head of its own instead of its embedding. Raises
    ModelLoadError for an adapter that was made for another base.
    """
    owners: dict[str, Change] = {}
    heads: list[Change] = []  # of a head that the base does not have
    for change in changes:
        found = _find(change.name, shapes)
        if found is None and change.module.rpartition(".")[2] == _HEAD and unties:
            heads.append(change)
            continue
        if found is None:
            raise _foreign(change)
        if found in owners:
            raise ModelLoadError(f"the adapter changes {found} twice")
        owners[found] = change
    embedding = next((name for name in _HEADS if name in shapes), None)
    if heads and (embedding is None or len(heads) > 1):
        raise _foreign(heads[0])
    head = None
    if embedding is not None and _HEADS[embedding] not in shapes:
        own = heads[0] if heads else None
        head = _untie(config, owners.get(embedding), own, _HEADS[embedding])
        if head is not None and not unties:
            raise _foreign(head.change)
    return MergePlan(owners, embedding, head, _count_tokens(owners, embedding, head, shapes))


def _find(wanted: str, names: Mapping[str, object]) -> str | None:
    """Return a tensor of the base by the adapter's name for it.

    A checkpoint of a bare model leaves out the first part of every name, an adapter of one does.
    """
    short = wanted.partition(".")[2]
    if wanted in names or short in names:
        return wanted if wanted in names else short
    longer = [name for name in names if name.endswith(f".{wanted}")]
    return longer[0] if len(longer) == 1 else None


def _untie(
    config: AdapterConfig, embedding: Change | None, head: Change | None, name: str
) -> NewHead | None:
    """Return the head that a base without one needs, if both are not the same afterwards."""
    if head is None:
        # Rows of single tokens are changed in both, which PEFT sees to.
        if embedding is None or set(embedding.parts) == {Kind.ROWS}:
            return None
        # The head is what the embedding was before anything was added to it.
        whole = {} if embedding.whole is None or not embedding.adds else {
            Kind.WEIGHT: embedding.whole
        }  # fmt: skip
        return NewHead(name, replace(embedding, module=_HEAD, parts=whole, rows=()))
    if config.values.get("ensure_weight_tying"):
        return None  # PEFT has trained one for both
    if embedding is not None and not (embedding.adds or head.adds):
        one, other = embedding.whole, head.whole
        if one is not None and other is not None and np.array_equal(one.load(), other.load()):
            return None
    return NewHead(name, head)


def _count_tokens(
    owners: Mapping[str, Change],
    embedding: str | None,
    new: NewHead | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> int | None:
    """Return how many tokens there are afterwards, None: as before.

    Raises ModelLoadError where embedding and head have not the same.
    """
    if embedding is None:
        return None
    before = shapes[embedding]
    after = owners[embedding].shape(before) if embedding in owners else before
    name = _HEADS[embedding]
    if new is not None:
        head = new.change.shape(before)
    elif name in shapes:
        head = owners[name].shape(shapes[name]) if name in owners else shapes[name]
    else:
        head = after
    if (after != before or head != shapes.get(name, before)) and head[0] != after[0]:
        raise ModelLoadError(
            f"the adapter leaves {after[0]} tokens in {embedding} and {head[0]} in {name}: it "
            "lacks one of the two"
        )
    return None if after[0] == before[0] else after[0]


def _foreign(change: Change) -> ModelLoadError:
    return ModelLoadError(
        f"the adapter changes {change.module}, and the base has no {change.name}: it is made for "
        "another base, or for a layer that shares its weights with the embedding"
    )
