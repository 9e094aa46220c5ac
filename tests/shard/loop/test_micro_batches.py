"""Steps of a pipeline share the sequences: each is in one that is under way, and in none twice."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.loop.batch_support import BUDGET, EOS, answer
from tests.shard.loop.scripted_router import BLOCK, row
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch


class Pipeline:
    """A batch, and the steps of it that are under way."""

    def __init__(self, stages: int = 2) -> None:
        self.batch = Batch(
            vocab_size=100, block_size=BLOCK, blocks=10_000, eos_ids=[EOS], micro_batches=stages
        )
        self.under_way: deque[StepPlan] = deque()

    def add(self, *numbers: int, new: int = 20) -> None:
        for number in numbers:
            blocks = range(10 * number, 10 * number + 9)
            self.batch.add(row(number, [11, 12, 13], new, blocks=list(blocks)))

    def launch(self) -> list[int]:
        plan = self.batch.plan(BUDGET)
        if plan is None:
            return []
        self.batch.mark_in_flight(plan)
        self.under_way.append(plan)
        return [sequence.id for sequence in plan.rows]

    def settle(self) -> list[int]:
        """Settle the oldest step; return whom it moved."""
        plan = self.under_way.popleft()
        moved = self.batch.settle(plan, answer(plan))
        assert not moved.faults
        self.batch.check()
        return [] if not moved.columns else moved.columns["sequence"].tolist()


def test_micro_batches_keep_their_rows() -> None:
    pipeline = Pipeline()
    pipeline.add(*range(1, 9))
    for _ in range(3):
        assert pipeline.launch() == [1, 2, 3, 4]
        assert pipeline.launch() == [5, 6, 7, 8]
        assert pipeline.launch() == []
        assert pipeline.batch.counts.stalled_rows == 0
        assert pipeline.settle() == [1, 2, 3, 4]
        assert pipeline.settle() == [5, 6, 7, 8]


def test_who_comes_and_goes_meanwhile() -> None:
    pipeline = Pipeline()
    pipeline.add(1, 2, 3, 4)
    assert (pipeline.launch(), pipeline.launch()) == ([1, 2], [3, 4])
    pipeline.batch.remove([1])
    pipeline.add(5)
    assert pipeline.settle() == [2]
    assert pipeline.launch() == [2, 5]
    assert pipeline.settle() == [3, 4]
    pipeline.batch.remove([2, 3])
    pipeline.add(2)  # another with the same number: what is under way is not of it
    assert sorted(pipeline.launch()) == [2, 4]
    assert pipeline.settle() == [5]


def test_a_lone_row_waits_for_its_token() -> None:
    pipeline = Pipeline()
    pipeline.add(1)
    assert (pipeline.launch(), pipeline.launch()) == ([1], [])
    assert pipeline.settle() == [1]
    assert pipeline.launch() == [1]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=12))
def test_no_row_is_in_two_steps_and_none_is_left_out_for_ever(
    stages: int, events: list[tuple[bool, int]]
) -> None:
    pipeline, here, number = Pipeline(stages), set[int](), 0
    for comes, count in [*events, (True, 1)]:
        if comes:
            own = range(number + 1, number + count + 1)
            number += count
            pipeline.add(*own)
            here.update(own)
        elif here:
            gone = sorted(here)[:count]
            pipeline.batch.remove(gone)
            here.difference_update(gone)
        pipeline.launch()
        flying = [row for plan in pipeline.under_way for row in plan.rows]
        assert len({id(row) for row in flying}) == len(flying)
        if len(pipeline.under_way) >= stages:
            pipeline.settle()
    moved = set[int]()
    for _ in range(2 * stages):
        while len(pipeline.under_way) < stages and pipeline.launch():
            pass
        moved.update(pipeline.settle())
    assert moved >= here


def test_rows_end_in_their_own_micro_batch() -> None:
    pipeline = Pipeline()
    pipeline.add(1, 2, new=1)
    pipeline.add(3, 4, new=3)
    assert (pipeline.launch(), pipeline.launch()) == ([1, 2], [3, 4])
    assert pipeline.settle() == [1, 2]
    assert len(pipeline.batch) == 2
    assert pipeline.settle() == [3, 4]
    assert (pipeline.launch(), pipeline.launch()) == ([3], [4])


@pytest.mark.parametrize("stages", [2, 3])
def test_a_step_of_a_pipeline_is_never_steady(stages: int) -> None:
    """What is kept of the last plan would be of the other micro-batch's rows."""
    pipeline = Pipeline(stages)
    pipeline.add(1, 2, 3)
    for _ in range(4):
        rows = [row for _ in range(stages) for row in pipeline.launch()]
        assert sorted(rows) == [1, 2, 3]
        while pipeline.under_way:
            pipeline.settle()
