"""How plain torch groups the rows of a step, and what each row reads of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan

Positions = TypeVar("Positions", np.int64, NDArray[np.int64])

_WASTE = 2  # longest context of a bucket, in multiples of its shortest
_LONG = 4096  # longer contexts get calls of their own rather than padded copies
_BUCKET_TOKENS = 1 << 16  # padded KV tokens that a bucket gathers


class Reach(NamedTuple):
    """How far a layer's queries see; see `AttentionLayer`."""

    window: int
    chunk: int
    ahead: bool

    def first(self, positions: Positions) -> Positions:
        """Return the first position that is visible from each of `positions`."""
        first = positions * 0
        if self.window:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk:
            first = np.maximum(first, positions - positions % self.chunk)
        return first


@dataclass(slots=True)
class Bucket:
    """Decoding rows of one padded call; `tokens` [B] are their indices in the step."""

    tokens: torch.Tensor
    table: torch.Tensor  # int64 [B * width] block ids
    beyond: torch.Tensor  # int64: gathered keys after the rows' own, as indices into B * keys
    rows: int
    starts: NDArray[np.int64]  # [B]: position of each row's first gathered token
    firsts: NDArray[np.int64]  # [B]: the first position that each row sees
    contexts: NDArray[np.int64]  # [B]
    width: int  # blocks per row
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def positions(self) -> NDArray[np.int64]:
        """Return the position of every gathered key, [B, width * BLOCK_SIZE]."""
        return self.starts[:, None] + np.arange(self.width * BLOCK_SIZE)

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [B, 1, 1, keys], made for the first layer that needs it."""
        if like.dtype not in self.masks:
            keys = self.positions()
            hidden = (keys >= self.contexts[:, None]) | (keys < self.firsts[:, None])
            mask = torch.zeros(hidden.shape, dtype=like.dtype)
            mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
            self.masks[like.dtype] = mask[:, None, None].to(like.device)
        return self.masks[like.dtype]


@dataclass(slots=True)
class Row:
    """A row computed by itself: a prefill chunk, or a decode without similar ones."""

    start: int  # first token in the step
    stop: int
    context: int
    first_block: int  # the first of consecutive blocks; -1: they are not consecutive
    table: torch.Tensor | None  # int64 [blocks], if they are not
    lasts: NDArray[np.int64] | None  # [Q]: the last position that each query sees; None: its own


def arrange(plan: StepPlan, reach: Reach, device: torch.device) -> tuple[list[Bucket], list[Row]]:
    """Split the plan's rows into buckets of decodes and rows to compute alone."""
    counts = np.diff(plan.query_starts)
    rows = [_make_row(plan, i, reach, device) for i in np.flatnonzero(counts > 1).tolist()]
    buckets: list[Bucket] = []
    decodes = np.flatnonzero(counts == 1)
    contexts = plan.context_lengths.astype(np.int64)
    seen = contexts - reach.first(contexts - 1)
    for group in _group_decodes(decodes, seen):
        if len(group) == 1:
            rows.append(_make_row(plan, int(group[0]), reach, device))
        else:
            buckets.append(_make_bucket(plan, group, contexts[group], seen[group], device))
    return buckets, rows


def _group_decodes(rows: NDArray[np.int64], seen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield groups of decodes whose padding wastes little.

    If a single group holds all of them it keeps their order, which `attend` relies on.
    """
    if len(rows) == 0:
        return
    lengths = seen[rows]
    longest = int(lengths.max())
    if (
        longest <= min(_LONG, _WASTE * int(lengths.min()) + 2 * BLOCK_SIZE)
        and longest * len(rows) <= _BUCKET_TOKENS
    ):
        yield rows
        return
    rows = rows[np.argsort(-lengths, kind="stable")]
    begin = 0
    while begin < len(rows):
        top = int(seen[rows[begin]])
        end = begin + 1
        while (
            end < len(rows)
            and top <= min(_LONG, _WASTE * int(seen[rows[end]]) + 2 * BLOCK_SIZE)
            and top * (end - begin + 1) <= _BUCKET_TOKENS
        ):
            end += 1
        yield rows[begin:end]
        begin = end


def _make_bucket(
    plan: StepPlan,
    group: NDArray[np.int64],
    contexts: NDArray[np.int64],
    seen: NDArray[np.int64],
    device: torch.device,
) -> Bucket:
    first = (contexts - seen) // BLOCK_SIZE  # blocks before the window are not read
    width = int((-(-contexts // BLOCK_SIZE) - first).max())
    columns = np.minimum(first[:, None] + np.arange(width), plan.block_tables.shape[1] - 1)
    table = plan.block_tables[group[:, None], columns].astype(np.int64)
    tokens = plan.query_starts[group].astype(np.int64)
    beyond = first[:, None] * BLOCK_SIZE + np.arange(width * BLOCK_SIZE) >= contexts[:, None]
    return Bucket(
        tokens=torch.from_numpy(tokens).to(device),
        table=torch.from_numpy(table.reshape(-1)).to(device),
        beyond=torch.from_numpy(np.flatnonzero(beyond)).to(device),
        rows=len(group),
        starts=first * BLOCK_SIZE,
        firsts=contexts - seen,
        contexts=contexts,
        width=width,
    )


def _make_row(plan: StepPlan, index: int, reach: Reach, device: torch.device) -> Row:
    context = int(plan.context_lengths[index])
    count = -(-context // BLOCK_SIZE)
    blocks = plan.block_tables[index, :count].astype(np.int64)
    first = int(blocks[0])
    consecutive = int(blocks[-1]) - first == count - 1 and bool((np.diff(blocks) == 1).all())
    return Row(
        start=int(plan.query_starts[index]),
        stop=int(plan.query_starts[index + 1]),
        context=context,
        first_block=first if consecutive else -1,
        table=None if consecutive else torch.from_numpy(blocks).to(device),
        lasts=_lasts(plan, index) if reach.ahead else None,
    )


def _lasts(plan: StepPlan, index: int) -> NDArray[np.int64] | None:
    """Return the last position that each of a row's queries sees; None: its own for all of them."""
    if plan.visible is None:
        return None
    own = slice(int(plan.query_starts[index]), int(plan.query_starts[index + 1]))
    lasts = plan.visible[own]
    return None if (lasts == plan.positions[own]).all() else lasts
