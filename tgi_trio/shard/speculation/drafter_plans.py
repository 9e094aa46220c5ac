"""Plans of the steps of drafters that have a KV cache of their own. No torch in this file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import ShardSequence, StepPlan


def plan_rows(
    rows: Sequence[ShardSequence],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    *,
    samples: bool = False,
) -> StepPlan:
    """Return a plan of `counts` [R] tokens of each row, at consecutive `positions`.

    `positions`, `token_ids`: [T], row after row; `samples`: whether rows choose their next token.
    """
    starts = np.concatenate(([0], np.cumsum(counts)))
    ends = positions[starts[1:] - 1] + 1
    size = -(-int(ends.max()) // BLOCK_SIZE)
    tables = np.zeros((len(rows), size), np.int32)
    for i, row in enumerate(rows):
        own = row.block_ids[:size]
        tables[i, : len(own)] = own
    row_of = np.repeat(np.arange(len(rows)), counts)
    blocks: NDArray[np.int64] = tables[row_of, positions // BLOCK_SIZE].astype(np.int64)
    return StepPlan(
        rows=list(rows),
        token_ids=token_ids.astype(np.int64),
        positions=positions.astype(np.int64),
        kv_slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts.astype(np.int32),
        context_lengths=ends.astype(np.int32),
        block_tables=tables,
        samples=np.full(len(rows), samples),
        prefills=np.zeros(len(rows), np.bool_),
    )
