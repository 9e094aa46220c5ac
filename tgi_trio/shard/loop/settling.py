"""Advances a batch by a step's result: lengths, tokens, finished sequences. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import Fault, Finish
from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.row_table import UNKNOWN, RowTable
from tgi_trio.shard.loop.step_columns import MovedRows, StepChanges, to_columns, to_columns_of_all

_MISCHOSEN = "the model runner chose a token where none was due, or none where one was"


class Settler:
    """Advances the rows of a table, step by step."""

    def __init__(self, table: RowTable, eos_ids: Iterable[int]) -> None:
        """`eos_ids`: tokens that end a sequence, unless it ignores them, as those of its own do."""
        self._table = table
        self._eos_ids = frozenset(eos_ids)
        self.expected: StepPlan | None = None  # its rows have moved, except for the tokens

    def expect(self, plan: StepPlan) -> None:
        """Advance the plan's rows before its tokens are known, by one for each row that samples.

        Then the next plan can be made. Until the result is there drafts count as wrong, so rows
        may turn out to be further. Raises ValueError for drafts of rows with recurrent states, and
        while another plan is expected.
        """
        if self.expected is not None or (plan.drafts is not None and plan.state_writes is not None):
            raise ValueError("drafts through states, or a second step, cannot be expected")
        if plan.taken is None:
            raise ValueError("only a plan of this batch can be expected")
        table = self._table
        if plan.uniform and plan.moment == table.moment:
            self._move_all(plan, UNKNOWN)
            self.expected = plan
            return
        places = table.places(plan)
        there = places >= 0
        table.computed[places[there]] += plan.taken[there]
        if plan.state_writes is not None:
            table.move_states(places[there], plan.state_writes[there])
        sampled = places[there & plan.samples]
        table.length[sampled] += 1
        table.remaining[sampled] -= 1
        table.last[sampled] = UNKNOWN
        self.expected = plan

    def settle(self, plan: StepPlan, result: StepResult) -> StepChanges:
        """Advance the plan's rows by its result; returns what the STEP frame reports.

        Rows that have left since it was planned are void. A row stops at its first finishing
        token: the length limit is tested before EOS, as in TGI. Rows that finish or fail are
        dropped from the batch, and are void in a step that was planned meanwhile.
        """
        uniform = plan.uniform and plan.moment == self._table.moment
        uniform = uniform and (self.expected is None or self.expected is plan)
        if uniform and (done := self._settle_uniform(plan, result)) is not None:
            return done
        expected, self.expected = self.expected is plan, None
        places, choices = self._table.places(plan), result.choices
        plain = (
            len(choices.token_ids) == len(places)
            and not choices.faults
            and (plan.drafts is None or plan.state_writes is None)
            and bool(plan.samples.all() and (choices.counts == 1).all() and (places >= 0).all())
        )
        if plain:
            moved = self._settle_plain(plan, places, choices.token_ids, expected)
            faults: list[Fault] = []
            dropped = [plan.rows[i] for i in np.flatnonzero(moved.finish).tolist()]
        else:
            moved, dropped, faults = self._settle_each(plan, places, choices)
        columns = to_columns(moved, choices, result.prompts)
        if dropped:
            self._table.remove({self._table.place_by_id[sequence.id] for sequence in dropped})
        return StepChanges(columns, dropped, faults)

    def _settle_uniform(self, plan: StepPlan, result: StepResult) -> StepChanges | None:
        """Settle a step of all rows in which each got one token and none ends; None for others.

        Without drafts a row gets one token at most, and none of a uniform plan reaches its limit.
        """
        table, choices, rows = self._table, result.choices, len(plan.rows)
        tokens = choices.token_ids
        if len(tokens) != rows or choices.faults or table.counting:
            return None
        each = tokens.tolist()
        if not self._eos_ids.isdisjoint(each):
            return None
        if table.own_ends and not table.own_ends.isdisjoint(each):
            return None
        if self.expected is None:
            self._move_all(plan, tokens)
        else:  # they have moved, but for the tokens
            table.last[:rows] = tokens
            self.expected = None
        _append_each(plan.rows, each, table.length[:rows].tolist())
        ids = table.ids
        if len(ids) != rows:  # others have come
            ids = ids[:rows]
        columns = to_columns_of_all(ids, table.computed[:rows], choices, result.prompts)
        return StepChanges(columns)

    def _move_all(self, plan: StepPlan, last: NDArray[np.int64] | int) -> None:
        """Move all rows of a uniform plan by a token; `last` as for `RowTable.move_first`."""
        self._table.move_first(len(plan.rows), last)
        if plan.state_writes is not None and plan.places is not None:
            self._table.move_states(plan.places, plan.state_writes)

    def _settle_plain(
        self, plan: StepPlan, places: NDArray[np.int64], tokens: NDArray[np.int64], expected: bool
    ) -> MovedRows:
        """Settle a step in which every row got one token: nearly every step."""
        if not expected and plan.taken is not None:
            self._table.computed[places] += plan.taken
            self._table.length[places] += 1
            self._table.remaining[places] -= 1
            if plan.state_writes is not None:
                self._table.move_states(places, plan.state_writes)
        self._table.last[places] = tokens
        length, minimum = self._table.length[places], self._table.minimum[places]
        finish = np.zeros(len(places), np.uint8)
        early = minimum > 0
        ended = self._is_eos(plan.rows, tokens)
        finish[ended & self._table.ends[places] & ~early] = Finish.EOS
        finish[self._table.remaining[places] <= 0] = Finish.LENGTH
        _append_each(plan.rows, tokens.tolist(), length.tolist())
        if early.any():
            self._table.minimum[places[early]] -= 1
            self._table.note_minimums()
            for i in np.flatnonzero(early).tolist():
                plan.rows[i].min_remaining -= 1
        computed, used = self._table.computed[places], np.ones(len(places), np.int64)
        return MovedRows(np.arange(len(places)), self._table.id[places], computed, used, finish)

    def _settle_each(
        self, plan: StepPlan, places: NDArray[np.int64], choices: Choices
    ) -> tuple[MovedRows, list[ShardSequence], list[Fault]]:
        """Settle a step row by row; also returns who is dropped, and the faults."""
        dropped: list[ShardSequence] = []
        faults: list[Fault] = []
        moved: list[tuple[int, int, int]] = []  # (row, tokens used, finish)
        tokens, ends = choices.token_ids.tolist(), np.cumsum(choices.counts).tolist()
        taken = plan.taken.tolist() if plan.taken is not None else [0] * len(places)
        stateful = plan.state_writes is not None
        drafts = plan.drafts.tolist() if plan.drafts is not None else [0] * len(places)
        # Rows whose whole computation counts. The states of the others have taken in a wrong draft:
        # their previous states stay current, and the tokens that were right are computed again.
        exact: list[int] = []
        columns = zip(plan.rows, places.tolist(), plan.samples.tolist(), ends, taken, strict=True)
        start = 0
        for row, (sequence, place, samples, end, known) in enumerate(columns):
            chosen, start = tokens[start:end], end
            if place < 0:
                continue
            fault = choices.faults.get(row)
            finish, used = Finish.NONE, 0
            if fault is not None or samples != (len(chosen) > 0):
                faults.append(Fault(sequence.id, fault or _MISCHOSEN))
                dropped.append(sequence)
                continue
            if samples:
                finish, used = self._append(sequence, chosen)
                self._table.last[place] = chosen[used - 1]
            if not (stateful and samples and used <= drafts[row]):
                sequence.computed = sequence.length - 1 if samples else sequence.computed + known
                exact.append(row)
            moved.append((row, used, finish))
            self._table.length[place] = sequence.length
            self._table.computed[place] = sequence.computed
            self._table.remaining[place] = sequence.remaining
            self._table.minimum[place] = sequence.min_remaining
            if finish:
                dropped.append(sequence)
        if plan.state_writes is not None and exact:
            self._table.move_states(places[exact], plan.state_writes[exact])
        rows, used_tokens, finishes = np.array(moved, np.int64).reshape(-1, 3).T
        own = places[rows]
        finish_column = finishes.astype(np.uint8)
        computed = self._table.computed[own]
        return (
            MovedRows(rows, self._table.id[own], computed, used_tokens, finish_column),
            dropped,
            faults,
        )

    def _append(self, sequence: ShardSequence, tokens: ListLike[int]) -> tuple[Finish, int]:
        """Append tokens up to a finishing one; return why the row ended, and how many they are."""
        for used, token in enumerate(tokens, start=1):
            length = sequence.length
            if length == len(sequence.token_ids):
                sequence.token_ids = _grow(sequence.token_ids)
            sequence.token_ids[length] = token
            sequence.length = length + 1
            sequence.remaining -= 1
            if sequence.remaining <= 0:
                return Finish.LENGTH, used
            if sequence.min_remaining > 0:
                sequence.min_remaining -= 1
            elif self._ends(sequence, token) and not sequence.sampling.ignore_eos:
                return Finish.EOS, used
        return Finish.NONE, len(tokens)

    def _ends(self, sequence: ShardSequence, token: int) -> bool:
        return token in self._eos_ids or token in sequence.sampling.ends

    def _is_eos(
        self, rows: ListLike[ShardSequence], tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        found = np.zeros(len(tokens), np.bool_)
        for eos in self._eos_ids:
            found |= tokens == eos
        for eos in self._table.own_ends:
            for row in np.flatnonzero(tokens == eos).tolist():
                found[row] |= eos in rows[row].sampling.ends
        return found


def _append_each(rows: list[ShardSequence], tokens: list[int], lengths: list[int]) -> None:
    """Append a token to each sequence; `lengths` are those afterwards."""
    for sequence, token, length in zip(rows, tokens, lengths, strict=True):
        try:
            sequence.token_ids[length - 1] = token
        except IndexError:
            sequence.token_ids = _grow(sequence.token_ids)
            sequence.token_ids[length - 1] = token
        sequence.length = length
        sequence.computed = length - 1
        sequence.remaining -= 1


def _grow(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a buffer of twice the size with the same beginning."""
    return np.concatenate((token_ids, np.empty_like(token_ids)))
