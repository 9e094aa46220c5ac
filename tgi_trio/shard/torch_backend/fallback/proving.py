"""Proves that a model's parts, over all ranks, are the model: what its plan says may be wrong.

A plan comes with a type of model, and nobody need have tried it with these settings. So a small
twin of the model (`twin.py`), whole on every rank, is computed first by plain passes; then each
rank cuts its own part of it as it has cut the model, and the paged way over all of them must say
the same. All ranks come to the same end of it together.
"""

from __future__ import annotations

from typing import Any

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import encoder_split_refusal
from tgi_trio.model.split import Portion
from tgi_trio.model.unserved_types import writing_refusal
from tgi_trio.shard.torch_backend.fallback.autoregression import find_other_writing
from tgi_trio.shard.torch_backend.fallback.division import read_division
from tgi_trio.shard.torch_backend.fallback.modes import ExecutionMode, PagedWay
from tgi_trio.shard.torch_backend.fallback.probe import (
    EXACT,
    LONG,
    SHORT,
    compute_plain,
    deviation,
    one_thread,
    probe,
    try_way,
)
from tgi_trio.shard.torch_backend.fallback.twin import build_twin
from tgi_trio.shard.torch_backend.models.decoder import Ranks


@torch.inference_mode()
def prove_parts(model: Any, ranks: Ranks) -> ExecutionMode:
    """Return the paged way of a model of which this rank has its part.

    Raises ModelLoadError, on all ranks, where its plan or that way does not hold.
    """
    kind = model.config.model_type
    with one_thread():
        twin = build_twin(model, ranks.size)
    if twin is None:
        raise ModelLoadError(
            f"Model type {kind!r} runs through transformers, and no small copy of it could be "
            f"built to try its plan for {ranks.size} shards on; use --num-shard 1."
        )
    with one_thread():
        if (why := find_other_writing(twin)) is not None:
            raise ModelLoadError(writing_refusal(kind, why))
        expected = compute_plain(twin, LONG)
        read_division(twin, Portion(ranks.rank, ranks.size)).divide(twin, ranks)
        found = compute_plain(twin, LONG)
        if not _agree(deviation(found, expected) <= EXACT, model, ranks):
            failure = next((row for row in found if isinstance(row, str)), "its logits differ")
            raise ModelLoadError(
                f"Model type {kind!r} runs through transformers, whose plan does not say of "
                f"{ranks.size} shards what one says: {failure}; use --num-shard 1."
            )
        way = PagedWay.try_make(twin)
        right = way is not None and deviation(probe(way, LONG), expected) <= EXACT
    if _agree(right, model, ranks):
        plain = compute_plain(model, SHORT)  # before its attention is replaced
        own = try_way(PagedWay.try_make, model, plain, EXACT)
        if _agree(own is not None, model, ranks) and own is not None:
            return own
    raise ModelLoadError(_unpaged_refusal(kind))


def find_undivided(way: ExecutionMode) -> str:
    """Return why a model on one rank could not be divided over two; "": nothing is known."""
    kind = way.model.config.model_type
    if way.model.config.is_encoder_decoder:
        return encoder_split_refusal(kind)
    if way.name != PagedWay.name:
        return _unpaged_refusal(kind)
    try:
        read_division(way.model, Portion(0, 2))
    except ModelLoadError as error:
        return str(error)
    return ""


def _agree(right: bool, model: Any, ranks: Ranks) -> bool:
    """Return whether all ranks have found it right."""
    return bool(ranks.least(int(right), model.device))


def _unpaged_refusal(model_type: str) -> str:
    return (
        f"Model type {model_type!r} runs through transformers with its own attention, which ours "
        "cannot replace, and is not split over shards so; use --num-shard 1."
    )
