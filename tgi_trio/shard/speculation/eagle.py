"""Drafts of a layer that continues from the model's hidden states: EAGLE-3's, or the model's own.

Its inputs are a token and the hidden state that chose it. It has a KV cache of its own, in blocks
of the same numbers as the model's, and continues from its own state and draft. It makes one chain
of best tokens (no tree), which is then verified. "EAGLE-3" (Li and others 2025, arXiv 2503.01840).
No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.arithmetic import Rows
from tgi_trio.shard.speculation.backlog import MOST, Backlog
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.hidden import Pick
from tgi_trio.shard.speculation.record import Record, judge_record, write_drafts
from tgi_trio.shard.speculation.sharing import share_room


class EagleLayer(Protocol):
    """A drafter's weights and KV cache, and the backend's operations."""

    max_positions: int  # longest sequence it was trained for; 0: the model's
    token_map: NDArray[np.int64] | None  # token of each row of its head; None: the row's number

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Concatenate along the first axis."""
        ...

    def pick(self, states: Rows, places: NDArray[np.int64]) -> Rows:
        """Return some of the rows."""
        ...

    def fuse(self, states: Rows) -> Rows:
        """Turn the model's states [n, all that it reads] into the layer's [n, features]."""
        ...

    def run(
        self, plan: StepPlan, states: Rows, wanted: NDArray[np.int64]
    ) -> tuple[Rows, NDArray[np.int64]]:
        """Compute a plan's tokens with a state [T, features] each, and store their K and V.

        Returns the layer's states [n, features] and the best row of its head [n] at the places
        `wanted`.
        """
        ...


class EagleReader:
    """Keeps a drafter's KV cache up to date with the model's steps."""

    def __init__(self, layer: EagleLayer) -> None:
        self.layer = layer
        self.backlog = Backlog()

    def keep(self, plan: StepPlan, sampled: NDArray[np.intp], choices: Choices, pick: Pick) -> None:
        """Keep a step's states (`Backlog.keep`), after reading the backlog if it is too long."""
        if self.backlog.due or self.backlog.size + len(plan.token_ids) > MOST:
            states = pick(np.arange(len(plan.token_ids)))  # reading may overwrite them
            self.read([])
            pick = partial(self.layer.pick, states)
        self.backlog.keep(plan, sampled, choices, pick)

    def drop(self, sequence: ShardSequence) -> None:
        """Note that a sequence has ended: its blocks may be reused after the next step."""
        self.backlog.drop(sequence)

    def clear(self) -> None:
        """Drop all states, if the KV blocks for them no longer exist."""
        self.backlog.clear()

    def read(self, sequences: Sequence[ShardSequence]) -> tuple[Rows, NDArray[np.int64]] | None:
        """Read the backlog; returns states and best rows after the last token of each sequence.

        None if the backlog is empty.
        """
        if not self.backlog.size:
            self.backlog.due = False
            return None
        plan, states = self.backlog.take(self.layer.join, self.layer.pick)
        last = {
            row.id: int(end) - 1 for row, end in zip(plan.rows, plan.query_starts[1:], strict=True)
        }
        wanted = np.array([last[sequence.id] for sequence in sequences], np.int64)
        return self.layer.run(plan, self.layer.fuse(states), wanted)


class EagleDrafter:
    """A drafter with a layer that has read the model's states."""

    def __init__(self, reader: EagleReader, most: int, eos_ids: Iterable[int]) -> None:
        """`most`: tokens to draft at most, per step and sequence."""
        self._reader = reader
        self._most = most
        self._eos_ids = frozenset(eos_ids)
        self._longest = reader.layer.max_positions

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        ready = [row for row in rows if self._is_ready(row.sequence)]
        records = {row.sequence.id: judge_record(row.sequence, self._most) for row in ready}
        shared = share_room(ready, spare, allowed=lambda one: records[one.id].allowed)
        for record in records.values():
            if not record.allowed:
                record.rest -= 1
        found = self._reader.read([row.sequence for row, _ in shared]) if shared else None
        return {} if found is None else self._draft(shared, records, *found)

    def _is_ready(self, sequence: ShardSequence) -> bool:
        fits = self._longest == 0 or sequence.length + self._most < self._longest
        return fits and self._reader.backlog.reaches(sequence)

    def _draft(
        self,
        shared: Sequence[tuple[DraftRow, int]],
        records: dict[int, Record],
        states: Rows,
        best: NDArray[np.int64],
    ) -> dict[int, int]:
        """Draft for all rows together, as many tokens as each may have."""
        layer = self._reader.layer
        drafts: list[list[int]] = [[] for _ in shared]
        going = np.arange(len(shared))
        while True:
            tokens = best if layer.token_map is None else layer.token_map[best]
            still = []
            for i, (place, token) in enumerate(zip(going.tolist(), tokens.tolist(), strict=True)):
                drafts[place].append(token)
                sequence, count = shared[place][0].sequence, shared[place][1]
                if len(drafts[place]) < count and not self._ends(sequence, token):
                    still.append(i)
            if not still:
                break
            going, tokens = going[still], tokens[still]
            states = layer.pick(states, np.array(still))
            sequences = [shared[place][0].sequence for place in going.tolist()]
            made = [len(drafts[place]) for place in going.tolist()]
            positions = np.array([s.length for s in sequences]) - 2 + np.array(made)
            ones = np.ones(len(going), np.int64)
            plan = plan_rows(sequences, ones, positions, tokens)
            states, best = layer.run(plan, states, np.arange(len(going)))
        counts = {}
        for (row, count), own in zip(shared, drafts, strict=True):
            record = records[row.sequence.id]
            counts[row.place] = write_drafts(row.sequence, record, own, count, self._eos_ids)
        return {place: count for place, count in counts.items() if count}

    def _ends(self, sequence: ShardSequence, token: int) -> bool:
        return token in self._eos_ids and not sequence.sampling.ignore_eos
