"""Guesses by a smaller model with the same tokenizer. No torch in this file.

It is a runner like any other, with KV blocks of the same numbers as the model it guesses for, so a
sequence's block table serves both. It computes what the sequence has got since it guessed last,
then guesses one token after another, for all rows at once. "Fast inference from transformers via
speculative decoding" (Leviathan and others 2022, arXiv 2211.17192); but its guesses are chosen with
the random numbers of the model's own choices, so that both agree as often as they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import BLOCK_SIZE, DraftRow, Runner, ShardSequence, StepPlan
from tgi_trio.shard.speculation.record import Record, judge_record, write_guesses
from tgi_trio.shard.speculation.sharing import share_room

CATCH_UP: Final = 256  # tokens of prompts that it computes between two steps, at most
_STATE: Final = "draft model"  # key in ShardSequence.state


@dataclass(slots=True)
class _Twin:
    """A sequence as the smaller model has it."""

    row: ShardSequence
    place: int = 0  # where its last guesses began
    guesses: tuple[int, ...] = ()

    def follow(self, sequence: ShardSequence) -> None:
        """Take over the sequence's tokens and blocks; K and V behind a wrong guess are void."""
        row = self.row
        for token in self.guesses:
            if self.place >= sequence.length or sequence.token_ids[self.place] != token:
                break
            self.place += 1
        if self.guesses:
            row.computed = min(row.computed, self.place)
        self.guesses = ()
        row.token_ids, row.block_ids = sequence.token_ids, sequence.block_ids
        row.length, row.prompt_length = sequence.length, sequence.prompt_length
        row.remaining, row.min_remaining = sequence.remaining, sequence.min_remaining


class ModelDrafter:
    """Guesses by a runner that nobody else uses."""

    def __init__(self, runner: Runner, most: int, eos_ids: Iterable[int], vocab_size: int) -> None:
        """`runner`: warmed up; `eos_ids`, `vocab_size`: of the model that is guessed for."""
        self._runner = runner
        self._most = most
        self._eos_ids = frozenset(eos_ids)
        self._known = min(vocab_size, runner.info.vocab_size)  # tokens that both have
        self._longest = runner.info.max_positions

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        fit = [row for row in rows if self._fits(row.sequence)]
        records = {row.sequence.id: judge_record(row.sequence, self._most) for row in fit}
        shared = share_room(fit, spare, allowed=lambda one: records[one.id].allowed)
        for record in records.values():
            if not record.allowed:
                record.rest -= 1
        twins = [_twin(row.sequence) for row, _ in shared]
        ready = self._catch_up(twins)
        chosen = [
            (row, twin, count)
            for (row, count), twin, is_ready in zip(shared, twins, ready, strict=True)
            if is_ready
        ]
        return self._guess(chosen, records) if chosen else {}

    def _fits(self, sequence: ShardSequence) -> bool:
        """Return whether the smaller model can compute a sequence: its length, its last token."""
        last = int(sequence.token_ids[sequence.length - 1])
        room = self._longest == 0 or sequence.length + self._most < self._longest
        return room and last < self._known

    def _catch_up(self, twins: Sequence[_Twin]) -> list[bool]:
        """Compute a part of what is missing; return who needs no more than his last tokens."""
        left, ready = CATCH_UP, []
        parts: list[tuple[ShardSequence, int]] = []
        for twin in twins:
            row = twin.row
            missing = row.length - row.computed
            ready.append(missing <= 1 + self._most)
            if not ready[-1] and left > 0:
                count = min(missing - 1, left)
                left -= count
                parts.append((row, count))
        if parts:
            self._runner.step(_plan(parts, samples=False))
            for row, count in parts:
                row.computed += count
        return ready

    def _guess(
        self, chosen: Sequence[tuple[DraftRow, _Twin, int]], records: dict[int, Record]
    ) -> dict[int, int]:
        guesses: list[list[int]] = [[] for _ in chosen]
        going = list(range(len(chosen)))
        while going:
            parts = [
                (chosen[i][1].row, chosen[i][1].row.length - chosen[i][1].row.computed)
                for i in going
            ]
            found = self._runner.step(_plan(parts, samples=True)).rows
            still = []
            for i, result in zip(going, found, strict=True):
                sequence, row, count = chosen[i][0].sequence, chosen[i][1].row, chosen[i][2]
                row.computed = row.length
                if result.fault is not None or not len(result.token_ids):
                    continue
                token = int(result.token_ids[0])
                if token >= self._known or self._ends(sequence, token):
                    continue
                guesses[i].append(token)
                if len(guesses[i]) < count and row.length < len(row.token_ids):
                    row.token_ids[row.length] = token  # behind the known ones, as guesses are
                    row.length += 1
                    row.remaining -= 1
                    still.append(i)
            going = still
        counts = {}
        for (place, sequence, _), twin, count, own in (
            (*each, found) for each, found in zip(chosen, guesses, strict=True)
        ):
            written = write_guesses(sequence, records[sequence.id], own, count, self._eos_ids)
            twin.place, twin.guesses = sequence.length, tuple(own[:written])
            if written:
                counts[place] = written
        return counts

    def _ends(self, sequence: ShardSequence, token: int) -> bool:
        return token in self._eos_ids and not sequence.sampling.ignore_eos


def _twin(sequence: ShardSequence) -> _Twin:
    """Return a sequence as the smaller model has it, up to date."""
    twin = sequence.state.get(_STATE)
    if not isinstance(twin, _Twin):
        asked = sequence.sampling
        # What looks at the tokens before, or at a grammar, is left to the model itself: guesses
        # that prove wrong would have to be taken back.
        plain = replace(
            asked,
            repetition_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            watermark=False,
            top_n=0,
            prompt_logprobs=False,
            prompt_top_n=0,
            grammar="",
            adapter=0,
        )
        row = replace(sequence, computed=0, sampling=plain, state={})
        twin = sequence.state[_STATE] = _Twin(row)
    twin.follow(sequence)
    return twin


def _plan(parts: Sequence[tuple[ShardSequence, int]], *, samples: bool) -> StepPlan:
    """Return a plan of the next so many tokens of each row."""
    rows, counts = [row for row, _ in parts], np.array([count for _, count in parts])
    firsts = np.array([row.computed for row in rows])
    ends = firsts + counts
    starts = np.concatenate(([0], np.cumsum(counts)))
    size = -(-int(ends.max()) // BLOCK_SIZE)
    tables = np.zeros((len(rows), size), np.int32)
    for i, row in enumerate(rows):
        own = row.block_ids[:size]
        tables[i, : len(own)] = own
    positions = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
    of_token = np.repeat(np.arange(len(rows)), counts)
    blocks: NDArray[np.int64] = tables[of_token, positions // BLOCK_SIZE].astype(np.int64)
    ids = [row.token_ids[a:b] for row, a, b in zip(rows, firsts, ends, strict=True)]
    return StepPlan(
        rows=rows,
        token_ids=np.concatenate(ids).astype(np.int64),
        positions=positions.astype(np.int64),
        kv_slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts.astype(np.int32),
        context_lengths=ends.astype(np.int32),
        block_tables=tables,
        samples=np.full(len(rows), samples),
        prefills=np.zeros(len(rows), np.bool_),
    )
