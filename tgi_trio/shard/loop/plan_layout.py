"""Lays out a step's rows and their tokens as the flat arrays of a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.loop.row_table import UNKNOWN, RowTable
from tgi_trio.shard.media.held_image import place_features
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.media.prompt_geometry import PARTS


def lay_out(
    table: RowTable,
    chosen: NDArray[np.int64],
    known: NDArray[np.int64],
    prefill: NDArray[np.bool_],
    drafts: NDArray[np.int64] | None,
    *,
    before: StepPlan | None,
    keeps_states: bool,
) -> StepPlan:
    """Return the step of the rows at the places `chosen`, of which it has `known` query tokens and
    then drafts; all are [R].

    `before`: the step that is expected to choose tokens that are not known yet.
    """
    rows = [table.sequences[place] for place in chosen.tolist()]
    first = table.computed[chosen]
    taken = known if drafts is None else known + drafts
    samples = first + known == table.length[chosen]
    several = prefill | (taken > 1) | ~samples  # all others compute their last token alone
    context = first + taken
    starts, places, positions = _spread(chosen, first, taken)
    token_ids = table.last[places]
    for i in np.flatnonzero(several).tolist():
        sequence, at = rows[i], int(first[i])
        token_ids[starts[i] : starts[i + 1]] = sequence.token_ids[at : int(context[i])]
    size = table.block_size
    widest = -(-int(context.max()) // size)
    turning, visible = None, None
    if table.shaped:
        turning, visible = _see_images(table, rows, prefill, starts, places, positions)
    kv_slots = table.blocks[places, positions // size] * np.int64(size) + positions % size
    reads = writes = None
    if keeps_states:
        reads, writes = table.state_slots(chosen, context)
        kv_slots = np.where(positions < table.kept[places], positions % size, kv_slots)
    return StepPlan(
        rows=rows,
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        query_starts=starts,
        context_lengths=context.astype(np.int32),
        block_tables=table.blocks[chosen, :widest],
        samples=samples,
        drafts=None if drafts is None else drafts.astype(np.int32),
        prefills=prefill,
        inputs=_find_inputs(table, token_ids, places, before),
        rotary_positions=turning,
        visible=visible,
        state_reads=reads,
        state_writes=writes,
        features=_find_features(rows, prefill, first, starts),
        places=chosen,
        taken=known,
        moment=table.moment,
    )


def _spread(
    chosen: NDArray[np.int64], first: NDArray[np.int64], taken: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return where rows' tokens begin [R + 1], each token's place in the table and position [T].

    All given are [R]: the rows' places, their first positions, how many tokens they take.
    """
    starts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(taken, out=starts[1:])
    if starts[-1] == len(chosen):  # one token each: rows and tokens are the same thing
        return starts, chosen, first
    positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], taken)
    return starts, np.repeat(chosen, taken), positions


def _see_images(
    table: RowTable,
    rows: list[ShardSequence],
    prefill: NDArray[np.bool_],
    starts: NDArray[np.int32],
    places: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return a plan's `rotary_positions` and `visible`; None where they are as everywhere."""
    shapes = [rows[i].geometry for i in np.flatnonzero(prefill).tolist()]
    parts = max((shape.parts for shape in shapes if shape is not None), default=PARTS)
    turning = np.tile(positions + table.delta[places], (parts, 1))
    visible = positions.copy()
    for i in np.flatnonzero(prefill).tolist():
        geometry, tokens = rows[i].geometry, slice(int(starts[i]), int(starts[i + 1]))
        if geometry is not None:
            geometry.turn(int(positions[tokens.start]), turning[:, tokens])
            visible[tokens] = geometry.lasts(positions[tokens])
    ahead, turned = (visible != positions).any(), (turning != positions).any()
    return turning if turned else None, visible if ahead else None


def _find_inputs(
    table: RowTable,
    token_ids: NDArray[np.int64],
    places: NDArray[np.int64],
    before: StepPlan | None,
) -> NDArray[np.int32] | None:
    """Return which row of the step before chooses each token, and blank those ids."""
    if before is None or before.places is None:
        return None
    unknown = token_ids == UNKNOWN
    token_ids[unknown] = 0
    row_of = np.full(len(table.length), -1, np.int32)
    own = table.places(before)
    row_of[own[own >= 0]] = np.flatnonzero(own >= 0)
    return np.where(unknown, row_of[places], -1).astype(np.int32)


def _find_features(
    rows: list[ShardSequence],
    prefill: NDArray[np.bool_],
    first: NDArray[np.int64],
    starts: NDArray[np.int32],
) -> PlacedFeatures | None:
    """Return the features among the query tokens of prefills: `first` [R] their first positions."""
    found: list[tuple[int, PlacedFeatures]] = []
    for i in np.flatnonzero(prefill).tolist():
        start, position = int(starts[i]), int(first[i])
        end = position + int(starts[i + 1]) - start
        parts = (image.between(position, end) for image in rows[i].images)
        found += [(start, part) for part in parts if part is not None]
    return place_features(found)
