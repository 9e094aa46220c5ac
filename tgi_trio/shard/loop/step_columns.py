"""A step's results as the columns of a STEP frame. No torch in this file."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import Fault
from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import (
    Choices,
    PromptValues,
    ShardSequence,
)

Columns = dict[str, NDArray[Any]]


@dataclass(slots=True)
class StepChanges:
    """What a step has changed in the batch; `columns` go into the STEP frame."""

    columns: Columns  # by name, as `ipc.frames` lists them for STEP; empty ones are left out
    dropped: ListLike[ShardSequence] = ()  # finished or failed
    faults: ListLike[Fault] = ()


@dataclass(slots=True)
class MovedRows:
    """The rows of a plan that moved, M of them, as columns."""

    rows: NDArray[Any]  # [M] which rows of the plan they are, rising
    sequence: NDArray[Any]  # [M] ids
    computed: NDArray[Any]  # [M] tokens whose K and V are in the blocks
    used: NDArray[Any]  # [M] how many of the row's chosen tokens count
    finish: NDArray[Any]  # [M] Finish


def to_columns(moved: MovedRows, choices: Choices, prompts: Mapping[int, PromptValues]) -> Columns:
    """Return the columns of the rows that moved, with their tokens and alternatives."""
    token_ids, logprobs, tops = choices.token_ids, choices.logprobs, choices.tops
    rows = len(moved.rows)
    tokens = int(moved.used.sum())
    if tokens != len(token_ids):
        kept = _mark_kept(moved, choices.counts)
        token_ids, logprobs = token_ids[kept], logprobs[kept]
        tops = None if tops is None else tops.kept(kept)
    columns: Columns = {
        "sequence": moved.sequence,
        "computed": moved.computed,
        "token_count": moved.used,
        "prompt_count": _repeat(0, rows),
        "finish": moved.finish,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "top_count": _repeat(0, tokens),
    }
    if tops is not None:
        _add_alternatives(columns, "top", tops)
    if prompts:
        _add_prompts(columns, moved.rows.tolist(), prompts)
    return columns


def to_columns_of_all(
    ids: NDArray[Any],
    computed: NDArray[Any],
    choices: Choices,
    prompts: Mapping[int, PromptValues],
) -> Columns:
    """Return what `to_columns` does where each row of a plan got one token, and none has ended.

    `ids` and `computed` are [R].
    """
    ones, zeros = _repeat(1, len(ids)), _repeat(0, len(ids))
    if prompts:
        rows = np.arange(len(ids))
        return to_columns(MovedRows(rows, ids, computed, ones, zeros), choices, prompts)
    columns: Columns = {
        "sequence": ids,
        "computed": computed,
        "token_count": ones,
        "prompt_count": zeros,
        "finish": zeros,
        "token_ids": choices.token_ids,
        "logprobs": choices.logprobs,
        "top_count": zeros,
    }
    if choices.tops is not None:
        _add_alternatives(columns, "top", choices.tops)
    return columns


@lru_cache(maxsize=64)
def _repeat(value: int, rows: int) -> NDArray[np.uint32]:
    """Return uint32 [rows] of one value, which nobody may write to."""
    every = np.full(rows, value, np.uint32)
    every.flags.writeable = False
    return every


def _mark_kept(moved: MovedRows, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which chosen tokens count: the first ones of rows that moved. [N]"""
    used = np.zeros(len(counts), np.int64)
    used[moved.rows] = moved.used
    ends = np.cumsum(counts)
    offsets = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    kept: NDArray[np.bool_] = offsets < np.repeat(used, counts)
    return kept


def _add_prompts(columns: Columns, rows: list[int], prompts: Mapping[int, PromptValues]) -> None:
    """Add what the rows' prompt tokens got."""
    given = [prompts.get(row) for row in rows]
    columns["prompt_count"] = np.array([len(p.logprobs) if p else 0 for p in given], np.int64)
    values = [value for p in given if p for value in p.logprobs]
    columns["prompt_logprobs"] = np.array(values, np.float64)
    columns["prompt_top_count"] = np.zeros(len(values), np.int64)
    if any(p and p.tops for p in given):
        tops = [top for p in given if p for top in (p.tops or [()] * len(p.logprobs))]
        _add_alternatives(columns, "prompt_top", Listed.of(tops))


def _add_alternatives(columns: Columns, name: str, tops: Listed) -> None:
    columns[f"{name}_count"] = tops.counts
    columns[f"{name}_ids"], columns[f"{name}_logprobs"] = tops.token_ids, tops.logprobs
