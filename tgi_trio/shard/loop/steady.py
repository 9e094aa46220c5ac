"""Plans of a batch that only decodes: their common parts are made once. No torch here.

Positions, context lengths and KV slots are computed for many steps at once, since a numpy call
takes as long for one step as for a hundred. Arrays that plans share must not be written to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import (
    PlanCounts,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.loop.row_table import RowTable
from tgi_trio.shard.media.prompt_geometry import PARTS

_Number = TypeVar("_Number", np.int32, np.int64)
_FURTHEST: Final = 256  # most steps that are computed together
_MOST: Final = 4096  # most rows of these steps together, unless a single step has more


@dataclass(frozen=True, slots=True)
class _Coming:
    """Numbers of the N steps to come, [N, R] each: a row of them is a plan's."""

    steps: int
    first: int  # position of the first row in the first of them
    positions: NDArray[np.int64]
    contexts: NDArray[np.int32]
    kv_slots: NDArray[np.int64]

    @classmethod
    def of(
        cls, table: RowTable, places: NDArray[np.int64], first: NDArray[np.int64], steps: int
    ) -> _Coming:
        """Return those of the rows at `places`, which have blocks for as many tokens behind the
        positions `first`; all are [R].
        """
        positions = first + np.arange(steps)[:, None]
        blocks, offsets = np.divmod(positions, table.block_size)
        slots = table.blocks[places, blocks] * np.int64(table.block_size) + offsets
        contexts = (positions + 1).astype(np.int32)
        return cls(steps, int(first[0]), positions, contexts, slots)


@dataclass(slots=True)
class SteadyDecode:
    """Every row of the table computes its last token, step after step, until a command comes.

    Most steps of a server are like that, and nothing but positions and tokens differs in them. All
    rows move by one token a step: where one of them is says where all are.
    """

    version: int  # of the table: a command ends it
    steps: int  # that may still be planned, until a row needs another block or chooses its last
    reach: int  # the largest context of the next plan, at most: each has one token more
    rows: list[ShardSequence]
    ones: NDArray[np.int64]  # [R]
    places: NDArray[np.int64]  # [R] in the table
    first: int  # of those
    uniform: bool  # the rows are in the table's order: `places` are 0, 1, 2 and so on
    unknown: NDArray[np.int64]  # [R] tokens that are not known yet: 0
    inputs: NDArray[np.int32]  # [R] who chooses tokens in a step that is expected: the same rows
    starts: NDArray[np.int32]  # [R + 1]
    samples: NDArray[np.bool_]  # [R] all of them
    prefills: NDArray[np.bool_]  # [R] none
    counts: PlanCounts
    stateful: bool  # the model keeps states
    tables: NDArray[np.int32]  # [R, width] the rows' blocks, as far as the last plan needed them
    coming: _Coming | None = field(default=None, init=False)

    @classmethod
    def after(cls, plan: StepPlan, table: RowTable) -> SteadyDecode | None:
        """Return what the plans after this one have in common, if they are of that kind."""
        rows = len(plan.rows)
        if (
            rows != len(table.sequences)
            or len(plan.token_ids) != rows
            or plan.prefills is None
            or plan.places is None
            or plan.prefills.any()
            or not plan.samples.all()
        ):
            return None
        left = np.minimum(table.granted[:rows] - table.computed[:rows], table.remaining[:rows])
        uniform = bool((np.diff(plan.places) > 0).all())
        return cls(
            version=table.version,
            steps=int(left.min()) - 1,
            reach=int(plan.context_lengths.max()) + 1,
            rows=plan.rows,
            ones=fix(np.ones(rows, np.int64)),
            places=fix(plan.places),
            first=int(plan.places[0]),
            uniform=uniform,
            unknown=fix(np.zeros(rows, np.int64)),
            inputs=fix(np.arange(rows, dtype=np.int32)),
            starts=fix(plan.query_starts),
            samples=fix(plan.samples),
            prefills=fix(plan.prefills),
            counts=plan.counts,
            stateful=plan.state_reads is not None,
            tables=fix(plan.block_tables),
        )

    def is_current(
        self, table: RowTable, token_budget: int, expected: StepPlan | None = None
    ) -> bool:
        """Return whether the next plan is one of these, behind a step that is `expected`."""
        rows = len(self.rows)
        known = self.version == table.version and self.steps > 0 and rows <= token_budget
        return known and (expected is None or expected.rows is self.rows)

    def plan(self, table: RowTable, expected: StepPlan | None = None) -> StepPlan:
        """Return the next plan; the batch has settled the one before, or expects it."""
        coming, at = self._find_numbers(table)
        self.steps -= 1
        width, self.reach = -(-self.reach // table.block_size), self.reach + 1
        if width != self.tables.shape[1]:
            self.tables = fix(self._own(table.blocks[:, :width]))
        places, positions = self.places, coming.positions[at]
        known = self._own(table.last) if expected is None else self.unknown
        # By position: Python would make a dict of keywords, which takes as long as all the rest.
        plan = StepPlan(
            self.rows,
            known,
            positions,
            coming.kv_slots[at],
            self.starts,
            coming.contexts[at],
            self.tables,
            self.samples,
        )
        plan.prefills, plan.inputs = self.prefills, None if expected is None else self.inputs
        plan.places, plan.taken, plan.moment = places, self.ones, table.moment
        plan.decodes, plan.counts = True, self.counts
        plan.uniform = self.uniform and self.steps > 0  # else a row may choose its last token
        if self.stateful:
            plan.state_reads, plan.state_writes = table.state_slots(places, positions + 1)
        if table.shaped:
            plan.rotary_positions = self._turning(positions, table)
        return plan

    def _find_numbers(self, table: RowTable) -> tuple[_Coming, int]:
        """Return the numbers of steps to come, and which of them the next one is."""
        coming = self.coming
        if coming is not None:
            at = int(table.computed[self.first]) - coming.first
            if 0 <= at < coming.steps:
                return coming, at
        # One step at first: where rows come and go with every step, more would be made for nothing.
        most = 1 if coming is None else min(_FURTHEST, max(1, _MOST // len(self.rows)))
        own = self._own(table.computed)
        coming = self.coming = _Coming.of(table, self.places, own, min(self.steps, most))
        return coming, 0

    def _turning(self, positions: NDArray[np.int64], table: RowTable) -> NDArray[np.int64] | None:
        """Return `StepPlan.rotary_positions`: tokens behind images turn with one position."""
        delta = self._own(table.delta)
        return np.tile(positions + delta, (PARTS, 1)) if delta.any() else None

    def _own(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """Return a copy of the rows' part of a column; a slice takes half the time of an index."""
        return column[: len(self.rows)].copy() if self.uniform else column[self.places]


def fix(array: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only; return it."""
    array.flags.writeable = False
    return array
