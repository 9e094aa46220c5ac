"""Plans whose rows are all decodes: recognising them, splitting drafts into rows, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.kv_cache import NULL_BLOCK
from tgi_trio.shard.torch_backend.states.pool import NULL_SLOT

ALL_KNOWN: Final = np.empty(0, np.int32)  # `inputs` where the host knows every token
UNREAD: Final = np.empty(0, np.int64)  # `lengths` for models that do not read them
# Tokens of an idle prompt beside decodes. It has more tokens than a decode's attention tile has
# (query, head) pairs, so that attention uses its larger tile for it.
_PROMPT: Final = 32
ALL_KNOWN.flags.writeable = UNREAD.flags.writeable = False


def only_decodes(plan: StepPlan) -> bool:
    """Return whether every row of the plan has one query token, and none of an image."""
    one_each = len(plan.token_ids) == len(plan.context_lengths)
    return plan.decodes or (one_each and not has_image_tokens(plan))


def has_image_tokens(plan: StepPlan) -> bool:
    """Return whether any token has image features, sees later ones, or turns by several positions.

    Text behind an image has several rotary positions too, but they are equal.
    """
    turns = plan.rotary_positions
    several = turns is not None and bool((turns != turns[0]).any())
    return several or plan.features is not None or plan.visible is not None


def rotary_position(plan: StepPlan) -> NDArray[np.int64]:
    """Return the rotary position, int64 [T], of each token of a plan of decodes."""
    return plan.positions if plan.rotary_positions is None else plan.rotary_positions[0]


def are_decodes(plan: StepPlan) -> bool:
    """Return whether a plan consists of decodes and their drafts, without any prefill chunk."""
    if plan.decodes:
        return True
    if not plan.samples.all() or has_image_tokens(plan):
        return False
    if plan.drafts is None:  # each row has a token at least
        return len(plan.token_ids) == len(plan.samples)
    return bool((np.diff(plan.query_starts) == 1 + plan.drafts).all())


def as_decodes(plan: StepPlan) -> StepPlan | None:
    """Return the plan with one row per query token, if it has only decodes and their drafts.

    None for a plan with a prefill chunk, and for one whose drafts pass through states, since those
    are computed one after another. The K and V of all tokens are written before any are read, so
    each token attends to its sequence up to itself. `rows` and `samples` stay as they are.
    """
    if not are_decodes(plan):
        return None
    if plan.drafts is None:
        return plan
    if plan.state_writes is not None:
        return None
    counts = np.diff(plan.query_starts)
    return StepPlan(
        rows=plan.rows,
        token_ids=plan.token_ids,
        positions=plan.positions,
        kv_slots=plan.kv_slots,
        query_starts=np.arange(len(plan.token_ids) + 1, dtype=np.int32),
        context_lengths=(plan.positions + 1).astype(np.int32),
        block_tables=np.repeat(plan.block_tables, counts, axis=0),
        samples=plan.samples,
        inputs=plan.inputs,
        moves=plan.moves,
        rotary_positions=plan.rotary_positions,
        owners=np.repeat(np.arange(len(counts)), counts),
    )


def pad_plan(plan: StepPlan, size: int) -> StepPlan:
    """Return a plan padded to `size` decodes; `rows` and `samples` stay as they are."""
    more = size - len(plan.token_ids)
    width = plan.block_tables.shape[1]
    tables = np.full((more, width), NULL_BLOCK, plan.block_tables.dtype)

    def filled(values: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
        return np.concatenate((values, np.full(more, value, values.dtype)))

    reads, writes = plan.state_reads, plan.state_writes
    return StepPlan(
        rows=plan.rows,
        token_ids=filled(plan.token_ids, 0),
        positions=filled(plan.positions, 0),
        kv_slots=filled(plan.kv_slots, NULL_BLOCK * BLOCK_SIZE),
        query_starts=np.arange(size + 1, dtype=np.int32),
        context_lengths=filled(plan.context_lengths, 1),
        block_tables=np.concatenate((plan.block_tables, tables)),
        samples=plan.samples,
        inputs=plan.inputs,
        rotary_positions=(
            None
            if plan.rotary_positions is None
            else np.tile(filled(rotary_position(plan), 0), (len(plan.rotary_positions), 1))
        ),
        state_reads=None if reads is None else filled(reads, NULL_SLOT),
        state_writes=None if writes is None else filled(writes, NULL_SLOT),
        owners=plan.owners,
    )


def idle_plan(size: int, width: int) -> StepPlan:
    """Return a plan of `size` padding rows, with block tables of `width` blocks a row."""
    none = StepPlan(
        rows=[],
        token_ids=np.empty(0, np.int64),
        positions=np.empty(0, np.int64),
        kv_slots=np.empty(0, np.int64),
        query_starts=np.zeros(1, np.int32),
        context_lengths=np.empty(0, np.int32),
        block_tables=np.empty((0, width), np.int32),
        samples=np.empty(0, np.bool_),
    )
    return pad_plan(none, size)


def idle_chunks(rows: int) -> StepPlan:
    """Return a plan of `rows` idle prefill chunks of two tokens each."""
    plan = idle_plan(2 * rows, 1)
    return replace(
        plan,
        query_starts=plan.query_starts[::2],
        context_lengths=np.full(rows, 2, np.int32),
        positions=np.tile(np.arange(2), rows),
        kv_slots=np.tile(NULL_BLOCK * BLOCK_SIZE + np.arange(2), rows),
        block_tables=plan.block_tables[:rows],
    )


def idle_beside_prompt(rows: int) -> StepPlan:
    """Return an idle plan of `rows` rows: one prefill chunk and decodes behind it.

    All tokens are at position 0, since the longest sequence may be shorter than the chunk.
    """
    counts = np.ones(rows, np.int32)
    counts[0] = _PROMPT
    width = -(-_PROMPT // BLOCK_SIZE)
    plan = idle_plan(int(counts.sum()), width)
    places = np.concatenate((np.arange(_PROMPT), np.zeros(rows - 1, np.int64)))
    return replace(
        plan,
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=counts,
        kv_slots=NULL_BLOCK * BLOCK_SIZE + places % BLOCK_SIZE,
        block_tables=plan.block_tables[:rows],
    )
