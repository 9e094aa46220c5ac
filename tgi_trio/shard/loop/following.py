"""Plans a step behind one whose drafts are not verified yet. No torch here.

The runner verifies them by itself (`StepPlan.moves`). Until the previous step has been settled, its
rows are planned as if all of their drafts were wrong, with blocks for all of them being right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import PlanCounts, StepPlan
from tgi_trio.shard.loop.row_table import UNKNOWN, RowTable
from tgi_trio.shard.runner import DraftRow

# Given rows and how many tokens may be drafted in all: how many each gets, by place.
Share = Callable[[list[DraftRow], int], dict[int, int]]


@dataclass(frozen=True, slots=True)
class FollowingRows:
    """The rows of a table that go on behind a step."""

    places: NDArray[np.int64]  # [R] in the table
    row_of: NDArray[np.int32]  # by place: which row of the step before
    slack: NDArray[np.int64]  # [R] how much further they may be
    room: NDArray[np.int64]  # [R] drafts that their blocks and lengths leave

    @classmethod
    def find(cls, table: RowTable, before: StepPlan, most: int) -> FollowingRows | None:
        """Return all rows but those that end for certain; None where a step must be read first.

        So it is where they are more than `most`, and where any row did not take part, may be at the
        end of its blocks, or has images.
        """
        n, own = len(table.sequences), table.places(before)
        here = own >= 0
        row_of, slack = np.full(n, -1, np.int32), np.zeros(n, np.int64)
        row_of[own[here]] = np.flatnonzero(here)
        if before.drafts is not None:
            slack[own[here]] = before.drafts[here]
        room = table.granted[:n] - table.length[:n] - slack
        fits = (row_of >= 0) & ~table.held[:n] & (table.last[:n] == UNKNOWN) & (room >= 0)
        places = np.flatnonzero(table.remaining[:n] > 0)
        if not 0 < len(places) <= most or table.shaped or not fits[places].all():
            return None
        room = np.minimum(room, table.remaining[:n] - 1)[places]
        return cls(places, row_of, slack[places], room)

    def plan(self, table: RowTable, share: Share, spare: int) -> StepPlan:
        """Return their next step, `spare` drafts among its tokens at most."""
        count, size = len(self.places), table.block_size
        rows = [table.sequences[place] for place in self.places.tolist()]
        ones, drafts = np.ones(count, np.int64), np.zeros(count, np.int64)
        asking = zip(range(count), rows, self.room.tolist(), strict=True)
        shared = share([DraftRow(*row) for row in asking], spare)
        drafts[list(shared)] = list(shared.values())
        taken, first = ones + drafts, table.computed[self.places]
        starts = np.zeros(count + 1, np.int32)
        np.cumsum(taken, out=starts[1:])
        places = np.repeat(self.places, taken)
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], taken)
        widest = -(-int((first + taken + self.slack).max()) // size)
        return StepPlan(
            rows=rows,
            token_ids=np.zeros(len(places), np.int64),
            positions=positions,
            kv_slots=table.blocks[places, positions // size] * np.int64(size) + positions % size,
            query_starts=starts,
            context_lengths=(first + taken).astype(np.int32),
            block_tables=table.blocks[self.places, :widest],
            samples=np.ones(count, np.bool_),
            drafts=drafts.astype(np.int32) if shared else None,
            prefills=np.zeros(count, np.bool_),
            inputs=self.row_of[places],
            moves=True,
            places=self.places,
            taken=ones,
            moment=table.moment,
            counts=PlanCounts(decode_rows=count, draft_tokens=int(drafts.sum())),
        )


def settle_positions(plan: StepPlan, block_size: int) -> None:
    """Put the rows of a plan where they are, once the step before has been settled."""
    if not plan.moves:
        return
    counts = np.diff(plan.query_starts)
    ends = np.array([row.length - 1 for row in plan.rows], np.int64)
    more = ends - plan.positions[plan.query_starts[:-1]]
    plan.positions = plan.positions + np.repeat(more, counts)
    plan.context_lengths = plan.context_lengths + more.astype(np.int32)
    blocks, offsets = np.divmod(plan.positions, block_size)
    own = plan.block_tables[np.repeat(np.arange(len(counts)), counts), blocks]
    plan.kv_slots = own.astype(np.int64) * block_size + offsets
    plan.moves = False
