"""Drafts by a draft model: a smaller model with the same tokenizer. No torch in this file.

The draft model is a runner like any other. Its KV blocks have the same numbers as the target
model's, so a sequence's block table serves both. It computes the tokens that the sequence has got
since its last drafts, then drafts one token after another, for all rows at once. "Fast inference
from transformers via speculative decoding" (Leviathan and others 2022, arXiv 2211.17192); but
drafts are sampled with the same random numbers as the target model's choices, so that both agree
as often as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from tgi_trio.shard.contract import (
    RowResult,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.runner import (
    DraftRow,
    Pending,
    Runner,
)
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.record import Record, judge_record, write_drafts
from tgi_trio.shard.speculation.sharing import share_room

CATCH_UP: Final = 256  # most tokens of prompts that it computes between two steps
_STATE: Final = "draft model"  # key in ShardSequence.state
_READ: Final = "draft model's tokens"  # the same: leading tokens that it has rows for, or `_NEVER`
_NEVER: Final = 1 << 62  # more than any sequence has: one of its tokens is unknown


@dataclass(slots=True)
class _Twin:
    """The draft model's copy of a sequence."""

    row: ShardSequence
    place: int = 0  # where its last drafts began
    drafts: tuple[int, ...] = ()

    def follow(self, sequence: ShardSequence) -> None:
        """Copy the sequence's tokens and blocks; K and V from a wrong draft on are invalid."""
        row = self.row
        for token in self.drafts:
            if self.place >= sequence.length or sequence.token_ids[self.place] != token:
                break
            self.place += 1
        if self.drafts:
            row.computed = min(row.computed, self.place)
        self.drafts = ()
        row.token_ids, row.block_ids = sequence.token_ids, sequence.block_ids
        row.length, row.prompt_length = sequence.length, sequence.prompt_length
        row.remaining, row.min_remaining = sequence.remaining, sequence.min_remaining


_Asked: TypeAlias = tuple[DraftRow, _Twin, int]  # a row, its twin, and how many tokens to draft


class ModelDrafter:
    """A drafter with a draft model's runner, which only the drafter uses."""

    def __init__(self, runner: Runner, most: int, eos_ids: Iterable[int], vocab_size: int) -> None:
        """`runner`: warmed up; `eos_ids`, `vocab_size`: the target model's."""
        self._runner = runner
        self._most = most
        self._eos_ids = frozenset(eos_ids)
        self._known = min(vocab_size, runner.info.vocab_size)  # tokens that both models have
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
        return self._draft(chosen, records) if chosen else {}

    def _fits(self, sequence: ShardSequence) -> bool:
        """Return whether the draft model can compute a sequence's length and all of its tokens.

        It may have fewer rows than the model, and one of them among the model's spare ones be a
        token of a prompt: of an adapter's tokenizer, or given by its id.
        """
        if self._longest and sequence.length + self._most >= self._longest:
            return False
        read = sequence.state.get(_READ)
        first = read if isinstance(read, int) else 0
        if first < sequence.length:
            news = sequence.token_ids[first : sequence.length]
            first = _NEVER if news.max() >= self._known else sequence.length
            sequence.state[_READ] = first
        return first != _NEVER

    def _catch_up(self, twins: Sequence[_Twin]) -> list[bool]:
        """Compute some of the missing tokens; return which twins lack only their last tokens."""
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

    def _draft(self, chosen: Sequence[_Asked], records: dict[int, Record]) -> dict[int, int]:
        first = _plan(_missing(chosen, range(len(chosen))), samples=True)
        ahead = self._runner.runs_ahead(first)
        drafts = self._draft_ahead(chosen, first) if ahead else self._draft_in_turn(chosen)
        counts = {}
        for (place, sequence, _), twin, count, own in (
            (*each, found) for each, found in zip(chosen, drafts, strict=True)
        ):
            written = write_drafts(sequence, records[sequence.id], own, count, self._eos_ids)
            twin.place, twin.drafts = sequence.length, tuple(own[:written])
            twin.row.computed = min(twin.row.computed, sequence.length + written)
            if written:
                counts[place] = written
        return counts

    def _draft_ahead(self, chosen: Sequence[_Asked], plan: StepPlan) -> list[list[int]]:
        """Return drafts of a runner that launches each step before the previous one is read.

        `plan`: the first step. Tokens after an EOS are computed, but dropped.
        """
        going = list(range(len(chosen)))
        launched: list[tuple[list[int], Pending]] = []
        while going:
            launched.append((going, self._runner.launch(plan)))
            still = []
            for i in going:
                row = chosen[i][1].row
                row.computed = row.length
                if len(launched) < chosen[i][2] and row.length < len(row.token_ids):
                    row.length += 1
                    row.remaining -= 1
                    still.append(i)
            if still:
                before = {i: place for place, i in enumerate(going)}
                plan = _plan(_missing(chosen, still), samples=True)
                plan.token_ids[:] = 0
                plan.inputs = np.array([before[i] for i in still], np.int32)
            going = still
        drafts: list[list[int]] = [[] for _ in chosen]
        for nth, (rows, pending) in enumerate(launched):
            for i, result in zip(rows, pending.result().rows, strict=True):
                token = self._token(chosen[i][0].sequence, result)
                if token is not None and len(drafts[i]) == nth:
                    drafts[i].append(token)
        return drafts

    def _draft_in_turn(self, chosen: Sequence[_Asked]) -> list[list[int]]:
        """Return drafts of a runner whose steps are read one by one."""
        drafts: list[list[int]] = [[] for _ in chosen]
        going = list(range(len(chosen)))
        while going:
            found = self._runner.step(_plan(_missing(chosen, going), samples=True)).rows
            still = []
            for i, result in zip(going, found, strict=True):
                sequence, row, count = chosen[i][0].sequence, chosen[i][1].row, chosen[i][2]
                row.computed = row.length
                if (token := self._token(sequence, result)) is None:
                    continue
                drafts[i].append(token)
                if len(drafts[i]) < count and row.length < len(row.token_ids):
                    row.token_ids[row.length] = token  # after the known ones, as drafts are
                    row.length += 1
                    row.remaining -= 1
                    still.append(i)
            going = still
        return drafts

    def _token(self, sequence: ShardSequence, result: RowResult) -> int | None:
        """Return a draft; None for a fault, an EOS, or a token unknown to the target model."""
        if result.fault is not None or not len(result.token_ids):
            return None
        token = int(result.token_ids[0])
        ends = token in self._eos_ids and not sequence.sampling.ignore_eos
        return None if ends or token >= self._known else token


def _twin(sequence: ShardSequence) -> _Twin:
    """Return the draft model's copy of a sequence, up to date."""
    twin = sequence.state.get(_STATE)
    if not isinstance(twin, _Twin):
        sampling = sequence.sampling
        # Without penalties and grammars, whose state would have to be undone after wrong drafts.
        plain = replace(
            sampling,
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


def _missing(chosen: Sequence[_Asked], places: Iterable[int]) -> list[tuple[ShardSequence, int]]:
    """Return the rows at `places`, each with the number of its uncomputed tokens."""
    rows = [chosen[place][1].row for place in places]
    return [(row, row.length - row.computed) for row in rows]


def _plan(parts: Sequence[tuple[ShardSequence, int]], *, samples: bool) -> StepPlan:
    """Return a plan of the given number of next tokens of each row."""
    rows, counts = [row for row, _ in parts], np.array([count for _, count in parts])
    firsts = np.array([row.computed for row in rows])
    ends = firsts + counts
    positions = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    ids = [row.token_ids[a:b] for row, a, b in zip(rows, firsts, ends, strict=True)]
    return plan_rows(rows, counts, np.concatenate(positions), np.concatenate(ids), samples=samples)
