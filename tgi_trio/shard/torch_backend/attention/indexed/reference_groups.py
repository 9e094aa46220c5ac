"""How plain torch groups the tokens of a step whose index scores are computed together.

Decodes are together, with rows of similar contexts at a time; prefills are cut into tiles of one
row's queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan

_SCORES = 1 << 22  # products of query heads and keys computed at a time


@dataclass(slots=True)
class ScoredGroup:
    """Tokens that are scored together: decodes of several rows, or several tokens of one row."""

    tokens: torch.Tensor  # int64 [N]
    reach: torch.Tensor  # int64 [N, 1]: the last position that each sees
    places: torch.Tensor  # int64 [rows, keys]: the slots of each row's first keys


@dataclass(slots=True)
class Choice:
    """The tokens of the cache to which a step's tokens attend."""

    slots: torch.Tensor  # int64 [T, most]
    hidden: torch.Tensor  # bool [T, most]: not attended to, as there are fewer


def group_tokens(
    plan: StepPlan, heads: int, least: int, device: torch.device, *, unit: int = 1
) -> Iterator[ScoredGroup]:
    """Yield all tokens of a plan, in groups.

    `heads`: of the index; `least`: the smallest number of keys of a group, which may be more than
    its rows have, and which is a multiple of `unit`.
    """
    for rows, tokens in split_tokens(plan, plan.context_lengths, heads):
        keys = -(-max(int(plan.context_lengths[rows].max()), least) // unit) * unit
        yield ScoredGroup(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(plan.positions[tokens][:, None]).to(device),
            _places(plan, rows, keys).to(device),
        )


def split_tokens(
    plan: StepPlan, keys: NDArray[np.signedinteger], heads: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (rows, their tokens) to be scored together; `keys` [rows]: of a token, at most."""
    starts, keys = plan.query_starts.astype(np.int64), keys.astype(np.int64)
    counts = np.diff(starts)
    decodes = np.flatnonzero(counts == 1)
    decodes = decodes[np.argsort(-keys[decodes], kind="stable")]
    while len(decodes):
        longest = int(keys[decodes[0]])
        alike = int((keys[decodes] * 2 >= longest).sum())
        taken = max(1, min(alike, _SCORES // (longest * heads)))
        yield decodes[:taken], starts[decodes[:taken]]
        decodes = decodes[taken:]
    for row in np.flatnonzero(counts > 1):
        size = max(1, _SCORES // (int(keys[row]) * heads))
        for first in range(int(starts[row]), int(starts[row + 1]), size):
            yield np.array([row]), np.arange(first, min(first + size, int(starts[row + 1])))


def _places(plan: StepPlan, rows: NDArray[np.int64], keys: int) -> torch.Tensor:
    """Return the slots of the first `keys` tokens of each row, int64 [rows, keys]."""
    blocks = plan.block_tables[rows].astype(np.int64)
    blocks = np.pad(blocks, ((0, 0), (0, max(0, -(-keys // BLOCK_SIZE) - blocks.shape[1]))))
    slots = blocks[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
    return torch.from_numpy(slots.reshape(len(rows), -1)[:, :keys].copy())
