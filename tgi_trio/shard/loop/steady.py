"""Plans of a batch that only decodes: what they have in common is made once. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import PlanCounts, ShardSequence, StepPlan
from tgi_trio.shard.loop.row_table import RowTable

_Number = TypeVar("_Number", np.int32, np.int64)


@dataclass(slots=True)
class SteadyDecode:
    """Every row of the table computes its last token, step after step, until a command comes.

    Most steps of a server are like that, and nothing but positions and tokens differs in them.
    """

    version: int  # of the table: a command ends it
    steps: int  # that may still be planned, until a row needs another block or chooses its last
    reach: int  # the largest context of the next plan, at most: each has one token more
    rows: list[ShardSequence]
    ones: NDArray[np.int64]  # [R]
    places: NDArray[np.int64]  # [R] in the table
    uniform: bool  # the rows are in the table's order: `places` are 0, 1, 2 and so on
    inputs: NDArray[np.int32]  # [R] who chooses tokens in a step that is expected: the same rows
    starts: NDArray[np.int32]  # [R + 1]
    samples: NDArray[np.bool_]  # [R] all of them
    prefills: NDArray[np.bool_]  # [R] none
    counts: PlanCounts
    stateful: bool  # the model keeps states

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
        return cls(
            version=table.version,
            steps=int(left.min()) - 1,
            reach=int(plan.context_lengths.max()) + 1,
            rows=plan.rows,
            ones=np.ones(rows, np.int64),
            places=plan.places,
            uniform=bool((np.diff(plan.places) > 0).all()),
            inputs=np.arange(rows, dtype=np.int32),
            starts=plan.query_starts,
            samples=plan.samples,
            prefills=plan.prefills,
            counts=plan.counts,
            stateful=plan.state_reads is not None,
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
        self.steps -= 1
        width, self.reach = -(-self.reach // table.block_size), self.reach + 1
        places, size = self.places, table.block_size
        positions = self._own(table.computed)
        context = (positions + 1).astype(np.int32)
        blocks, offsets = np.divmod(positions, size)
        own = table.blocks[places, blocks].astype(np.int64)
        reads = writes = None
        if self.stateful:
            reads, writes = table.state_slots(places, positions + 1)
        return StepPlan(
            rows=self.rows,
            token_ids=self._own(table.last)
            if expected is None
            else np.zeros(len(places), np.int64),
            positions=positions,
            kv_slots=own * size + offsets,
            query_starts=self.starts,
            context_lengths=context,
            block_tables=self._own(table.blocks[:, :width]),
            samples=self.samples,
            prefills=self.prefills,
            inputs=None if expected is None else self.inputs,
            rotary_positions=self._turning(positions, table),
            state_reads=reads,
            state_writes=writes,
            places=places,
            taken=self.ones,
            moment=table.moment,
            counts=self.counts,
            uniform=self.uniform and self.steps > 0,  # else a row may choose its last token
        )

    def _turning(self, positions: NDArray[np.int64], table: RowTable) -> NDArray[np.int64] | None:
        """Return `StepPlan.rotary_positions`: tokens behind images turn with one position."""
        if not table.shaped:
            return None
        return np.tile(positions + self._own(table.delta), (3, 1))

    def _own(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """Return a copy of the rows' part of a column; a slice takes half the time of an index."""
        return column[: len(self.rows)].copy() if self.uniform else column[self.places]
