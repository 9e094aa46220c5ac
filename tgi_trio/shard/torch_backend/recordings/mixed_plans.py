"""Steps that carry prompts, as recordings of some sizes have them: which size, and what is idle.

A size has so many tokens and so many rows; a step with fewer of both is filled up. Tokens that are
left over are those of one more row, which has no context: they see nothing, and what they write
goes to the null block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, NULL_BLOCK
from tgi_trio.shard.torch_backend.recordings.decode_plans import (
    ALL_KNOWN,
    UNREAD,
    has_image_tokens,
    turning_position,
)
from tgi_trio.shard.torch_backend.staging import Array
from tgi_trio.shard.torch_backend.states.chunks import Room

# Tokens of a step. What a step is filled up with costs little where weights set the pace, which is
# up to the first few hundred tokens, and its part of all products from there on.
_TOKENS: Final = (64, 128, 256, 384, 512, 768, 1024)
# Rows' sizes: how many, and how many times as large as the next one each is. Tiles of attention
# that rows might have, and have not, took an H200 half a millisecond a step for 96 rows of 8B.
_MOST_ROW_SIZES: Final = 3
_ROWS_APART: Final = 4
# Few rows, whose contexts are divided, for so many tokens each at most: what is divided is merged
# token by token, which took 1 ms of a step of 384 tokens.
_TOKENS_A_ROW: Final = 32


# Where layers keep states chunk follows chunk, each some twenty launches a layer, so a recording is
# long; and rows of more than one token, whose chunks are computed side by side, are few.
_MOST_TOKENS_WITH_STATES: Final = 256
_MOST_ROWS_IN_CHUNKS: Final = 8


class MixedSize(NamedTuple):
    """What a recording has room for."""

    tokens: int
    rows: int  # of a plan, and as many choices


def mixed_sizes(
    most_tokens: int, decodes: Sequence[int], *, states: bool = False
) -> list[MixedSize]:
    """Return what is recorded of steps of up to `most_tokens` tokens, the largest first.

    `decodes`: batch sizes that are recorded of decodes, rising; none of these has more rows.
    `states`: layers keep some.
    """
    if most_tokens <= 0 or not decodes:
        return []
    place = bisect_left(_TOKENS, most_tokens)
    tokens = [*_TOKENS[:place], *([most_tokens] if place < len(_TOKENS) else [])]
    rows, wanted = list[int](), decodes[-1]
    while len(rows) < _MOST_ROW_SIZES and wanted >= decodes[0]:
        rows.append(decodes[bisect_right(decodes, wanted) - 1])
        wanted = rows[-1] // _ROWS_APART
    # No step has more rows than tokens.
    sizes = [
        MixedSize(count, most)
        for count in reversed(tokens)
        for most, smaller in zip(rows, [*rows[1:], 0], strict=True)
        if smaller < count and (most == rows[0] or count <= most * _TOKENS_A_ROW)
    ]
    return [size for size in sizes if not states or size.tokens <= _MOST_TOKENS_WITH_STATES]


def widest_sizes(sizes: Sequence[MixedSize]) -> list[MixedSize]:
    """Return of sizes, the largest first, those with the most rows of as many tokens."""
    return [size for size in sizes if size.rows == sizes[0].rows]


def row_room(size: MixedSize) -> Room:
    """Return what layers with states have room for in recordings of a size."""
    return Room(size.tokens, size.rows + 1, min(size.rows, _MOST_ROWS_IN_CHUNKS))


def find_size(sizes: Iterable[MixedSize], plan: StepPlan, choices: int) -> MixedSize | None:
    """Return the smallest of `sizes` that holds a plan which makes so many choices."""
    tokens, rows = len(plan.token_ids), max(len(plan.context_lengths), choices)
    fits = [size for size in sizes if size.tokens >= tokens and size.rows >= rows]
    return min(fits, default=None)


def is_recordable(plan: StepPlan) -> bool:
    """Return whether a plan's tokens are plain ones, all of which the host has placed."""
    return not has_image_tokens(plan) and not plan.moves


def chosen_places(plan: StepPlan) -> NDArray[np.int64]:
    """Return behind which of a plan's tokens others are chosen, guesses' included: int64 [C]."""
    return choice_positions(plan, np.flatnonzero(plan.samples))


def token_arrays(plan: StepPlan, lengths: Array | None, places: NDArray[np.int64]) -> list[Array]:
    """Return a plan's tokens as they are sent, and behind which of them others are chosen.

    `lengths`: None for a model that reads none. `places`: what `chosen_places` returns.
    """
    inputs = ALL_KNOWN if plan.inputs is None else plan.inputs
    return [
        plan.token_ids,
        turning_position(plan),
        UNREAD if lengths is None else lengths,
        inputs,
        places,
    ]


def idle_step(size: MixedSize, width: int) -> StepPlan:
    """Return a plan of tokens that see nothing, with block tables of `width` blocks.

    It has a row more than `size`. All tokens are the first one's, and wherever a plan's rows end,
    those left over are the next row's.
    """
    rows = size.rows + 1
    starts = np.full(rows + 1, size.tokens, np.int32)
    starts[0] = 0
    return StepPlan(
        rows=[],
        token_ids=np.zeros(size.tokens, np.int64),
        positions=np.zeros(size.tokens, np.int64),
        kv_slots=np.full(size.tokens, NULL_BLOCK * BLOCK_SIZE, np.int64),
        query_starts=starts,
        context_lengths=np.zeros(rows, np.int32),
        block_tables=np.full((rows, width), NULL_BLOCK, np.int32),
        samples=np.empty(0, np.bool_),
        inputs=np.full(size.tokens, -1, np.int32),
    )


def idle_arrays(size: MixedSize) -> list[Array]:
    """Return what `token_arrays` does, of `idle_step`: every choice is behind the first token."""
    idle = idle_step(size, 1)
    ones = np.ones(size.tokens, np.int64)
    return token_arrays(idle, ones, np.zeros(size.rows, np.int64))
