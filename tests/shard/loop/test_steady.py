"""Plans of a batch that only decodes: made once, and the same as if each were made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest

from tests.shard.loop.batch_support import BUDGET, advance, answer, new_batch
from tests.shard.loop.scripted_router import row
from tgi_trio.ipc.messages import ExtendRow
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.steady import SteadyDecode


def decoding() -> Batch:
    """Return a batch of three that have decoded twice, with blocks for a few tokens more."""
    batch = new_batch()
    batch.add(row(1, [11, 12, 13], 30, blocks=[5, 9, 6]))
    batch.add(row(2, [21], 30, blocks=[7, 3]))
    batch.add(row(3, [31, 32], 30, blocks=[4, 8]))
    for _ in range(2):
        move(batch)
    return batch


def move(batch: Batch) -> StepPlan:
    plan = batch.plan(BUDGET)
    assert plan is not None
    advance(batch, plan, answer(plan))
    batch.check()
    return plan


def test_what_steps_have_in_common_is_made_once() -> None:
    batch = decoding()
    first, second = move(batch), move(batch)
    assert second.rows is first.rows
    assert second.query_starts is first.query_starts and second.samples is first.samples
    assert second.positions is not first.positions


@pytest.mark.parametrize(
    "command",
    [
        lambda batch: batch.add(row(4, [41], 9, blocks=[1])),
        lambda batch: batch.remove([2]),
        lambda batch: batch.extend(ExtendRow(3, [2])),
        lambda batch: batch.hold(1),
    ],
    ids=["add", "remove", "extend", "hold"],
)
def test_a_command_ends_it(command: Callable[[Batch], object]) -> None:
    batch = decoding()
    before = move(batch)
    command(batch)
    after = batch.plan(BUDGET)
    assert after is not None and after.query_starts is not before.query_starts


def test_plans_are_those_that_would_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """To where a row needs another block, and behind it."""
    steady, anew = decoding(), decoding()
    for _ in range(7):
        mine = move(steady)
        with monkeypatch.context() as patched:
            patched.setattr(SteadyDecode, "is_current", lambda *_: False)
            theirs = move(anew)
        assert_same(mine, theirs)


def test_plans_ahead_are_those_that_would_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """To where a row chooses its last token, and others need blocks."""
    batches = [decoding(), decoding()]
    for batch in batches:
        batch.add(row(4, [41], 7, blocks=[1, 10]))
    flying: list[StepPlan | None] = [None, None]
    common = 0
    while True:
        made: list[StepPlan | None] = []
        for i, batch in enumerate(batches):
            with monkeypatch.context() as patched:
                if i:
                    patched.setattr(SteadyDecode, "is_current", lambda *_: False)
                plan, before = batch.plan(BUDGET), flying[i]
            if before is not None:
                common += plan is not None and plan.query_starts is before.query_starts
                batch.settle(before, answer(before))
            if plan is not None:
                batch.expect(plan)
            made.append(plan)
            flying[i] = plan
        mine, theirs = made
        if mine is None or theirs is None:
            assert mine is theirs
            break
        assert_same(mine, theirs)
    assert common >= 3


def assert_same(mine: StepPlan, theirs: StepPlan) -> None:
    for field in fields(StepPlan):
        ours, other = getattr(mine, field.name), getattr(theirs, field.name)
        if isinstance(other, np.ndarray):
            assert (ours.tolist(), ours.dtype) == (other.tolist(), other.dtype), field.name
        elif field.name == "rows":
            assert [each.id for each in ours] == [each.id for each in other]
        elif field.name not in ("uniform", "decodes"):  # which let a shorter way be taken
            assert ours == other, field.name


def test_rows_that_join_while_a_step_flies_are_none_of_its() -> None:
    batch = decoding()
    plan = batch.plan(BUDGET)
    assert plan is not None and plan.uniform
    batch.expect(plan)
    batch.add(row(4, [41, 42], 9, blocks=[1]))
    moved = batch.settle(plan, answer(plan))
    assert moved.columns["sequence"].tolist() == [1, 2, 3]
    assert len(moved.columns["computed"]) == 3
    batch.check()
