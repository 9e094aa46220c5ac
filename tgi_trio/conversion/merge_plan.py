"""The base's tensors that an adapter changes, and whether head and embedding can remain tied.

Many models have no separate head: it is *tied* to the embedding, whose weights it shares
(`tie_word_embeddings`). PEFT lets an adapter change only one of the two. The merged model computes
what PEFT computes with the adapter beside the model, so it then has a separate head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tgi_trio.conversion.adapter_changes import AdapterTensor, Change, Floats
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG, AdapterConfig
from tgi_trio.model.adapters.tensor_kinds import TensorKind

_HEAD: Final = "lm_head"
# Embeddings to which a head may be tied, and the name of a separate head.
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
    """A separate head for a base with a tied one."""

    name: str
    change: Change  # of the embedding's tensor in the base


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The changes of a base's tensors."""

    changes: Mapping[str, Change]  # by names of the base's tensors
    embedding: str | None  # name of its tensor
    head: NewHead | None
    tokens: int | None  # new number of the embedding's rows; None: as before


def plan_merge(
    config: AdapterConfig,
    changes: Sequence[Change],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    unties: bool,
) -> MergePlan:
    """Return the plan for a base with tensors of these `shapes`.

    `unties`: the base's family may have a separate head. Raises ModelLoadError for an adapter that
    was made for another base.
    """
    owners: dict[str, Change] = {}
    heads: list[Change] = []  # of a head that the base does not have
    for change in changes:
        found = _find(change.name, shapes)
        if found is None and change.tensor == "bias":
            raise _unbiased(config, change)
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
    for change in (*owners.values(), *heads):
        if TensorKind.ROWS in change.parts:
            owners |= _without_bias(change, embedding, shapes)
    return MergePlan(owners, embedding, head, _count_tokens(owners, embedding, head, shapes))


def _find(wanted: str, names: Mapping[str, object]) -> str | None:
    """Return the base's name of a tensor, given the adapter's.

    Checkpoints of a bare model lack the first part of every name, and so do adapters of one.
    """
    short = wanted.partition(".")[2]
    if wanted in names or short in names:
        return wanted if wanted in names else short
    longer = [name for name in names if name.endswith(f".{wanted}")]
    return longer[0] if len(longer) == 1 else None


def _untie(
    config: AdapterConfig, embedding: Change | None, head: Change | None, name: str
) -> NewHead | None:
    """Return the head that a base with a tied one needs, if it differs from the embedding."""
    tied = bool(config.values.get("ensure_weight_tying"))  # PEFT has trained one change for both
    if head is None:
        # PEFT changes rows of single tokens in both.
        if embedding is None or tied or set(embedding.parts) == {TensorKind.ROWS}:
            return None
        # The head has the embedding's weights without additions.
        whole = {} if embedding.whole is None or not embedding.adds else {
            TensorKind.WEIGHT: embedding.whole
        }  # fmt: skip
        return NewHead(name, replace(embedding, module=_HEAD, parts=whole, rows=()))
    if tied and embedding is not None:
        return None
    if embedding is not None and not (embedding.adds or head.adds):
        one, other = embedding.whole, head.whole
        if one is not None and other is not None and np.array_equal(one.load(), other.load()):
            return None
    if embedding is not None and TensorKind.ROWS in embedding.parts and not head.rows:
        # Those of the embedding are the head's as well, and A and B are added to them.
        parts = {**head.parts, TensorKind.ROWS: embedding.parts[TensorKind.ROWS]}
        head = replace(head, parts=parts, rows=embedding.rows)
    return NewHead(name, head)


def _without_bias(
    rows: Change, embedding: str | None, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Change]:
    """Return the change of a head's bias where some of its rows are replaced, if it has one.

    PEFT computes such a head without its bias.
    """
    tied = embedding is not None and _HEADS[embedding] not in shapes
    head = _HEADS[embedding] if tied and embedding is not None else _find(rows.name, shapes)
    bias = f"{head}".removesuffix("weight") + "bias"
    if bias not in shapes:
        return {}

    def load() -> Floats:
        return np.zeros(shapes[bias], np.float32)

    parts = {TensorKind.BIAS: AdapterTensor(bias, shapes[bias], load)}
    return {bias: Change(bias.removesuffix(".bias"), "bias", parts)}


def _count_tokens(
    owners: Mapping[str, Change],
    embedding: str | None,
    new: NewHead | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> int | None:
    """Return the new number of tokens, None: as before.

    Raises ModelLoadError if embedding and head have different numbers.
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


def _unbiased(config: AdapterConfig, change: Change) -> ModelLoadError:
    if TensorKind.ADDED_BIAS not in change.parts:
        return _foreign(change)
    return ModelLoadError(
        f"the adapter adds a bias to {change.module} (lora_bias of {config.folder / CONFIG}), and "
        "the base has none there: it cannot be merged. Served beside others (--lora-adapters) it "
        "is added"
    )


def _foreign(change: Change) -> ModelLoadError:
    return ModelLoadError(
        f"the adapter changes {change.module}, and the base has no {change.name}: it is made for "
        "another base, or for a layer that shares its weights with the embedding"
    )
