"""What a batch asks of its drafter: its time counts, its failures are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.shard.torch_backend.models_support import sequence
from tgi_trio.shard.contract import Choices, DraftRow, PlanCounts, StepPlan, StepResult
from tgi_trio.shard.speculation.guessing import Guessing
from tgi_trio.shard.speculation.payoff import FIRST_REST, TRIAL

STEP = 1000  # nanoseconds of a step


@dataclass
class Slow:
    """A drafter that takes `cost` steps to guess one token, and fails when told to."""

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


def plans(guessing: Guessing, steps: int, *, tokens: int = 2) -> Iterator[bool]:
    """Decode one row; whether it was guessed for, step by step."""
    row = DraftRow(0, sequence(1, [5, 6], [1], new=9), 4)
    for _ in range(steps):
        counts = guessing.draft([row], 4)
        longs, ints = np.zeros(1, np.int64), np.zeros(1, np.int32)
        plan = StepPlan(
            [row.sequence], longs, longs, longs, ints, ints, ints, np.zeros(1, np.bool_),
            drafts=np.ones(1, np.int32) if counts else None, counts=PlanCounts(decode_rows=1),
        )  # fmt: skip
        got = tokens if counts else 1
        choices = Choices(np.array([got]), np.zeros(got, np.int64), np.zeros(got))
        guessing.note(plan, StepResult(choices, STEP, 0))
        yield bool(counts)


def test_the_time_that_guessing_takes_is_part_of_what_it_costs() -> None:
    for cost, pays in ((0.5, True), (1.2, False)):
        drafter = Slow(cost)
        guessing = Guessing(drafter, clock=lambda now=drafter.now: now[0])  # type: ignore[misc]
        guessed = sum(plans(guessing, FIRST_REST))
        assert (guessed > FIRST_REST - 10) is pays, cost
        assert pays or guessed <= TRIAL + 2


def test_a_drafter_that_fails_is_asked_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    drafter = Slow(0.1, fails=True)
    assert not any(plans(Guessing(drafter), 5))
    assert drafter.asked == 1
    said = capsys.readouterr().err
    assert "out of memory" in said and "one by one" in said
