"""What a batch asks of its drafter: its time counts, its failures are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.shard.torch_backend.models_support import sequence
from tgi_trio.shard.contract import (
    Choices,
    PlanCounts,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.drafting import Drafting
from tgi_trio.shard.speculation.payoff import FIRST_REST, TRIAL
from tgi_trio.shard.speculation.record import judge_record, take_rest

STEP = 1000  # nanoseconds of a step


@dataclass
class Slow:
    """A drafter that takes `cost` steps to draft one token, and fails when told to."""

    cost: float
    now: list[int] = field(default_factory=lambda: [0])
    fails: bool = False
    asked: int = 0

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        self.asked += 1
        self.now[0] += int(self.cost * STEP)
        if self.fails:
            raise RuntimeError("out of memory")
        return {row.place: 1 for row in rows}


def plans(
    drafting: Drafting, steps: int, *, tokens: int = 2, processor_ns: int = 0
) -> Iterator[bool]:
    """Decode one row; whether it was drafted for, step by step."""
    row = DraftRow(0, sequence(1, [5, 6], [1], new=9), 4)
    for _ in range(steps):
        counts = drafting.draft([row], 4)
        longs, ints = np.zeros(1, np.int64), np.zeros(1, np.int32)
        plan = StepPlan(
            [row.sequence], longs, longs, longs, ints, ints, ints, np.zeros(1, np.bool_),
            drafts=np.ones(1, np.int32) if counts else None, counts=PlanCounts(decode_rows=1),
        )  # fmt: skip
        got = tokens if counts else 1
        choices = Choices(np.array([got]), np.zeros(got, np.int64), np.zeros(got))
        drafting.note(plan, StepResult(choices, STEP, 0, processor_ns=processor_ns))
        yield bool(counts)


def test_the_time_that_drafting_takes_is_part_of_what_it_costs() -> None:
    for cost, pays in ((0.5, True), (1.2, False)):
        drafter = Slow(cost)
        drafting = Drafting(drafter, clock=lambda now=drafter.now: now[0])  # type: ignore[misc]
        drafted = sum(plans(drafting, FIRST_REST))
        assert (drafted > FIRST_REST - 10) is pays, cost
        assert pays or drafted <= TRIAL + 2


def test_the_time_on_a_processor_counts_where_a_step_tells_it() -> None:
    """Whatever the clock on the wall says."""
    for processor_ns, pays in ((0, False), (10**12, True)):
        clock = iter(range(0, 10**12, 10**6)).__next__  # each look at it is long after the last
        drafting = Drafting(Slow(0.0), clock=clock)
        drafted = sum(plans(drafting, FIRST_REST, processor_ns=processor_ns))
        assert (drafted > FIRST_REST - 10) is pays


def test_a_drafter_that_fails_is_asked_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    drafter = Slow(0.1, fails=True)
    assert not any(plans(Drafting(drafter), 5))
    assert drafter.asked == 1
    said = capsys.readouterr().err
    assert "out of memory" in said and "one by one" in said


def test_a_rest_of_all_sequences_is_taken_at_once() -> None:
    first, second = (sequence(i, [5, 6], [1], new=9) for i in (1, 2))
    for row, rest in ((first, 6), (second, 4)):
        judge_record(row, 3).rest = rest
    assert take_rest([first, second]) == 4
    assert (judge_record(first, 3).rest, judge_record(second, 3).rest) == (2, 0)
    assert take_rest([first, second]) == 0
    assert take_rest([first, sequence(3, [5], [1], new=9)]) == 0  # one that has no record yet


class Resting(Slow):
    """A drafter whose sequences rest five steps after each of its drafts."""

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        records = [judge_record(row.sequence, 1) for row in rows]
        self.asked += 1
        if any(record.rest for record in records):
            for record in records:
                record.rest -= 1
            return {}
        for record in records:
            record.rest = 5
        return {row.place: 1 for row in rows}


def test_a_drafter_is_not_asked_while_everybody_rests() -> None:
    drafter = Resting(0.0)
    drafting = Drafting(drafter)
    rows = [DraftRow(0, sequence(1, [5, 6], [1], new=9), 4)]
    found = [bool(drafting.draft(rows, 4)) for _ in range(13)]
    assert found == [i % 6 == 0 for i in range(13)]
    assert drafter.asked == 5  # the drafts, and once at the beginning of each rest
    drafting.draft(rows, 4)
    assert drafting.is_resting(1) and not drafting.is_resting(2)  # not with others beside it
