"""Chooses the way of running a transformers model, by comparing logits; see `fallback_runner.py`.

Each way is tried on a small float32 twin of the model (`twin.py`), where no error can hide behind
rounding, with a probe that is longer than the twin's windows and chunks. The first whose logits
equal those of a plain forward pass over the whole sequence is chosen. Then a short probe runs on
the model itself: in half precision it finds only what is broken altogether.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.unserved_types import writing_refusal
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.fallback.autoregression import find_other_writing
from tgi_trio.shard.torch_backend.fallback.modes import (
    CachedWay,
    ExecutionMode,
    PagedWay,
    RecomputeWay,
    RowOutcome,
)
from tgi_trio.shard.torch_backend.fallback.twin import FIRST_PLAIN_TOKEN, build_twin

EXACT: Final = 1e-3  # of the largest logit: rounding of float32
# Tolerance for a model whose implementations in transformers differ: Nemotron-H's scan clamps its
# time steps and its single step does not. Wrong positions or lost states are ten times as far off.
OWN_FORMS: Final = 2e-2
_ALIKE: Final = 0.9  # least cosine of all logits, in half precision
# Query tokens of the two rows at each step: chunks, decodes beside chunks, and decodes together.
SHORT: Final = ((4, 3), (5, 1), (1, 6), (1, 1))
LONG: Final = ((4, 3), (9, 1), (1, 11), (1, 1), (11, 1), (1, 9), (1, 1), (1, 1))
_TOKENS: Final = 70  # different ones in a probe
_BLOCKS: Final = 2  # of a row

Make = Callable[[Any], ExecutionMode | None]

CANDIDATES: Final[tuple[Make, ...]] = (
    PagedWay.try_make,
    CachedWay.try_make,
    partial(CachedWay.try_make, positions=False),
    partial(CachedWay.try_make, single_steps=True),
    partial(CachedWay.try_make, single_steps=True, positions=False),
)


@torch.inference_mode()
def choose_way(model: Any) -> ExecutionMode:
    """Return the first way that agrees with a plain forward pass; if none does, plain passes.

    Raises ModelLoadError for a model that does not generate by plain passes.
    """
    plain = RecomputeWay(model)
    with one_thread():
        twin = build_twin(model)
    if (why := find_other_writing(model if twin is None else twin)) is not None:
        raise ModelLoadError(writing_refusal(model.config.model_type, why))
    if twin is None:
        print(
            f"no small copy of {type(model).__name__} could be built to try faster ways on: every "
            "step computes each sequence from its first token, which is slow",
            file=sys.stderr,
        )
        return plain
    expected = compute_plain(model, SHORT)  # before any way changes the model's attention
    tries = (
        try_way(make, model, expected, tolerance) for make, tolerance in _find_right_ways(twin)
    )
    return next(filter(None, tries), plain)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: a twin is so small that several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _find_right_ways(twin: Any) -> Iterator[tuple[Make, float]]:
    """Yield the ways that are right on a twin, the best first, each with its tolerance."""
    inexact: list[tuple[Make, float]] = []
    with one_thread():
        expected = compute_plain(twin, LONG)
    for make in CANDIDATES:
        with one_thread():
            far = _measure(make, twin, expected)
        if far <= EXACT:
            yield make, EXACT
        elif far <= OWN_FORMS:
            inexact.append((make, OWN_FORMS))
    yield from inexact


def _measure(make: Make, twin: Any, expected: ListLike[RowOutcome]) -> float:
    """Return a way's `deviation` on a twin; inf if it cannot be made, or is ours and not exact."""
    way = make(twin)
    if way is None:
        return math.inf
    far = deviation(probe(way, LONG), expected)
    way.undo()
    return far if way.name == CachedWay.name or far <= EXACT else math.inf


def try_way(
    make: Make, model: Any, expected: ListLike[RowOutcome], tolerance: float
) -> ExecutionMode | None:
    """Return the way `make` for the model itself if it is right there too, else None.

    In half precision, rounding alone may send a token to another expert, so logits need only be
    similar.
    """
    way = make(model)
    if way is None:
        return None
    found = probe(way, SHORT)
    if model.dtype == torch.float32:
        right = deviation(found, expected) <= tolerance
    else:
        right = likeness(found, expected) >= _ALIKE
    if right:
        return way
    way.undo()
    return None


def compute_plain(model: Any, steps: ListLike[tuple[int, int]]) -> list[RowOutcome]:
    """Return what `probe` does, but by one plain forward pass over the whole of each row."""
    ends = np.cumsum(steps, axis=0)
    first, second = ends[-1].tolist()
    rows = [_probe_row(0, first), _probe_row(1, second)]
    plan = _probe_plan(rows, (first, second))
    whole = RecomputeWay(model).forward(plan, [ends[:, i] - 1 for i in range(2)])
    outcomes: list[RowOutcome] = []
    for step in range(len(steps)):
        outcomes += [row if isinstance(row, str) else row[step : step + 1] for row in whole]
    return outcomes


def probe(way: ExecutionMode, steps: ListLike[tuple[int, int]]) -> list[RowOutcome]:
    """Return the outcomes of two rows that are prefilled in chunks, mixed, and decoded.

    `steps`: query tokens of either row, step by step.
    """
    rows = [_probe_row(i, sum(counts[i] for counts in steps)) for i in range(2)]
    outcomes: list[RowOutcome] = []
    way.allocate(1 + _BLOCKS * len(rows))
    try:
        for counts in steps:
            wanted = [np.array([count - 1]) for count in counts]
            outcomes += way.forward(_probe_plan(rows, counts), wanted)
            for row, count in zip(rows, counts, strict=True):
                row.computed += count
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, IndexError) as error:
        return [f"{type(error).__name__}: {error}"]  # its code does not accept our arguments
    finally:
        for row in rows:
            way.drop(row)
        way.allocate(0)
    return outcomes


def deviation(ours: ListLike[RowOutcome], expected: ListLike[RowOutcome]) -> float:
    """Return the largest difference from a plain forward's logits, in parts of the largest logit
    (at least 1); inf if either failed."""
    pairs = _pairs(ours, expected)
    if pairs is None:
        return math.inf
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


def likeness(ours: ListLike[RowOutcome], expected: ListLike[RowOutcome]) -> float:
    """Return the cosine of all logits of a way and a plain forward; 0 if either failed."""
    pairs = _pairs(ours, expected)
    if pairs is None:
        return 0.0
    mine, theirs = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    return float(torch.cosine_similarity(mine, theirs, dim=0))


def _pairs(
    ours: ListLike[RowOutcome], expected: ListLike[RowOutcome]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return pairs of both's logits, in float32; None if either failed."""
    if len(ours) != len(expected):
        return None
    pairs = []
    for mine, theirs in zip(ours, expected, strict=True):
        if isinstance(mine, str) or isinstance(theirs, str):
            return None
        pairs.append((mine.float(), theirs.float()))
    return pairs


def _probe_row(index: int, count: int) -> ShardSequence:
    """Return a row of `count` tokens; the blocks of two rows alternate."""
    ids = (np.arange(count, dtype=np.int32) * (index + 2) + index) % _TOKENS + FIRST_PLAIN_TOKEN
    blocks = [1 + index + 2 * n for n in range(_BLOCKS)]
    return ShardSequence(index, ids, count, count, 0, blocks, 0, 0, SamplingParameters())


def _probe_plan(rows: list[ShardSequence], counts: tuple[int, ...]) -> StepPlan:
    spans = [np.arange(r.computed, r.computed + n) for r, n in zip(rows, counts, strict=True)]
    slots = [
        np.array(row.block_ids)[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
        for row, span in zip(rows, spans, strict=True)
    ]
    return StepPlan(
        rows=rows,
        token_ids=np.concatenate(
            [r.token_ids[s] for r, s in zip(rows, spans, strict=True)], dtype=np.int64
        ),
        positions=np.concatenate(spans),
        kv_slots=np.concatenate(slots),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=np.array([span[-1] + 1 for span in spans], dtype=np.int32),
        block_tables=np.array([row.block_ids for row in rows], dtype=np.int32),
        samples=np.ones(len(rows), dtype=np.bool_),
    )
