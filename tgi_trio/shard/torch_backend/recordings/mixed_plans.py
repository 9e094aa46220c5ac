"""Sizes of recorded steps with prompts, and how a plan is padded to one.

A size is a number of tokens and a number of rows. The tokens that a step leaves over belong to one
more row without a context: they attend to nothing, and their K and V go to the null block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.torch_backend.kv_cache import NULL_BLOCK
from tgi_trio.shard.torch_backend.recordings.decode_plans import (
    ALL_KNOWN,
    UNREAD,
    has_image_tokens,
    rotary_position,
)
from tgi_trio.shard.torch_backend.staging import Array
from tgi_trio.shard.torch_backend.states.chunks import Room

# Tokens of a step. Padding costs little while loading the weights takes longest, which is so up to
# the first few hundred tokens; beyond, it costs its share of all matrix products.
_TOKENS: Final = (64, 128, 256, 384, 512, 768, 1024)
# How many numbers of rows there are, and the ratio between neighbours. Empty attention tiles of
# rows that a step does not have took an H200 half a millisecond a step for 96 rows of 8B.
_MOST_ROW_SIZES: Final = 3
_ROWS_APART: Final = 4
# Smaller numbers of rows have their contexts divided among programs (split-KV), and the parts are
# merged token by token, which took 1 ms of a step of 384 tokens. So they have at most so many
# tokens a row.
_TOKENS_A_ROW: Final = 32
# Where states move from chunk to chunk by torch's operations, each chunk takes some twenty launches
# a layer, so a recording is long. Rows of more than one token, whose chunks are computed side by
# side, are few.
_MOST_TOKENS_IN_TURNS: Final = 256
_MOST_ROWS_IN_CHUNKS: Final = 8


class MixedSize(NamedTuple):
    """The room of a recording."""

    tokens: int
    rows: int  # as many choices, too


def mixed_sizes(
    most_tokens: int, decodes: Sequence[int], *, in_turns: bool = False
) -> list[MixedSize]:
    """Return the sizes to record for steps of up to `most_tokens` tokens, the largest first.

    `decodes`: the recorded batch sizes of decodes, ascending; no size has more rows than the
    largest. `in_turns`: see `MixerLayer.in_turns`.
    """
    if most_tokens <= 0 or not decodes:
        return []
    place = bisect_left(_TOKENS, most_tokens)
    tokens = [*_TOKENS[:place], *([most_tokens] if place < len(_TOKENS) else [])]
    rows, wanted = list[int](), decodes[-1]
    while len(rows) < _MOST_ROW_SIZES and wanted >= decodes[0]:
        rows.append(decodes[bisect_right(decodes, wanted) - 1])
        wanted = rows[-1] // _ROWS_APART
    # A step has at most as many rows as tokens.
    sizes = [
        MixedSize(count, most)
        for count in reversed(tokens)
        for most, smaller in zip(rows, [*rows[1:], 0], strict=True)
        if smaller < count and (most == rows[0] or count <= most * _TOKENS_A_ROW)
    ]
    return [size for size in sizes if not in_turns or size.tokens <= _MOST_TOKENS_IN_TURNS]


def widest_sizes(sizes: Sequence[MixedSize]) -> list[MixedSize]:
    """Return the sizes with the most rows, one for each number of tokens."""
    return [size for size in sizes if size.rows == sizes[0].rows]


def row_room(size: MixedSize, *, in_turns: bool) -> Room:
    """Return the room that layers with states have in recordings of a size."""
    longer = min(size.rows, _MOST_ROWS_IN_CHUNKS) if in_turns else size.rows
    return Room(size.tokens, size.rows + 1, longer)


def find_size(sizes: Iterable[MixedSize], plan: StepPlan, choices: int) -> MixedSize | None:
    """Return the smallest of `sizes` that holds a plan with so many choices."""
    tokens, rows = len(plan.token_ids), max(len(plan.context_lengths), choices)
    fits = [size for size in sizes if size.tokens >= tokens and size.rows >= rows]
    return min(fits, default=None)


def is_recordable(plan: StepPlan) -> bool:
    """Return whether a plan has no image tokens, and no rows that the device still has to move."""
    return not has_image_tokens(plan) and not plan.moves


def chosen_places(plan: StepPlan) -> NDArray[np.int64]:
    """Return the tokens after which others are chosen, those of drafts included: int64 [C]."""
    return choice_positions(plan, np.flatnonzero(plan.samples))


def token_arrays(plan: StepPlan, lengths: Array | None, places: NDArray[np.int64]) -> list[Array]:
    """Return a plan's arrays for upload: tokens, positions, lengths, inputs and `places`.

    `lengths`: None for a model that does not read them. `places`: what `chosen_places` returns.
    """
    inputs = ALL_KNOWN if plan.inputs is None else plan.inputs
    return [
        plan.token_ids,
        rotary_position(plan),
        UNREAD if lengths is None else lengths,
        inputs,
        places,
    ]


def idle_step(size: MixedSize, width: int) -> StepPlan:
    """Return a padding plan whose tokens attend to nothing; its tables have `width` blocks a row.

    It has one row more than `size`. All tokens belong to the first row; where a plan is copied over
    it, the tokens after the plan's last row belong to the row after that.
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
    """Return `token_arrays` of `idle_step`: every choice comes after the first token."""
    idle = idle_step(size, 1)
    ones = np.ones(size.tokens, np.int64)
    return token_arrays(idle, ones, np.zeros(size.rows, np.int64))
