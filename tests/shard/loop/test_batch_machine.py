"""Any run of the running set: commands and steps in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.shard.loop.batch_support import EOS, advance, answer, new_batch
from tests.shard.loop.scripted_router import BLOCK, row
from tgi_trio.ipc.messages import ExtendRow, Finish
from tgi_trio.shard.contract import (
    RowResult,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.batch import Batch


@dataclass
class Expected:
    """What a sequence should look like, kept the slow way."""

    tokens: list[int]
    computed: int
    blocks: list[int]
    remaining: int
    slots: set[int] = field(default_factory=set)


class AnyRun(RuleBasedStateMachine):
    """Commands and steps in any order, against a model that knows no arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = new_batch()
        self.model: dict[int, Expected] = {}
        self.last_id = 0
        self.last_block = 0

    def blocks(self, count: int) -> list[int]:
        self.last_block += count
        return list(range(self.last_block - count + 1, self.last_block + 1))

    @rule(
        prompt=st.lists(st.integers(3, 99), min_size=1, max_size=14),
        new=st.integers(1, 6),
        cached=st.integers(0, 13),
        spare=st.integers(-3, 3),
    )
    def add(self, prompt: list[int], new: int, cached: int, spare: int) -> None:
        self.last_id += 1
        cached = min(cached, len(prompt) - 1)
        count = max(-(-cached // BLOCK), -(-len(prompt) // BLOCK) + spare)
        blocks = self.blocks(count)
        self.batch.add(row(self.last_id, prompt, new, blocks=blocks, cached=cached))
        self.model[self.last_id] = Expected(list(prompt), cached, blocks, new)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from([*self.model, 10**6]))
        blocks = self.blocks(count)
        self.batch.extend(ExtendRow(sequence, blocks))
        if sequence in self.model:
            self.model[sequence].blocks += blocks

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from([*self.model, 10**6])))
        dropped = self.batch.remove(gone)
        assert {sequence.id for sequence in dropped} == gone & self.model.keys()
        for sequence in gone & self.model.keys():
            del self.model[sequence]

    @rule(budget=st.integers(1, 20), token=st.integers(EOS, 5))
    def step(self, budget: int, token: int) -> None:
        plan = self.batch.plan(budget)
        room = {
            i: min(len(e.tokens), len(e.blocks) * BLOCK) - e.computed for i, e in self.model.items()
        }
        assert self.batch.counts.stalled_rows == sum(r == 0 for r in room.values())
        if plan is None:
            assert not any(room.values())
            return
        assert len(plan.token_ids) == min(budget, sum(room.values()))
        assert len(set(plan.kv_slots.tolist())) == len(plan.kv_slots)
        for i, sequence in enumerate(plan.rows):
            self.check_row(plan, i, self.model[sequence.id])
        report, _ = advance(self.batch, plan, answer(plan, token))
        assert report.sequence == [sequence.id for sequence in plan.rows]
        for i, sequence in enumerate(plan.rows):
            expected = self.model[sequence.id]
            expected.computed = int(plan.context_lengths[i])
            finish = Finish.NONE
            if plan.samples[i]:
                expected.tokens.append(token)
                expected.remaining -= 1
                finish = Finish.EOS if token == EOS else Finish.NONE
                finish = finish if expected.remaining else Finish.LENGTH
            assert (report.computed[i], report.finish[i]) == (expected.computed, finish)
            if finish:
                del self.model[sequence.id]

    def check_row(self, plan: StepPlan, i: int, expected: Expected) -> None:
        start, stop = plan.query_starts[i : i + 2].tolist()
        positions = list(range(expected.computed, expected.computed + stop - start))
        assert positions
        assert plan.positions[start:stop].tolist() == positions
        assert plan.token_ids[start:stop].tolist() == [expected.tokens[p] for p in positions]
        slots = [expected.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        assert plan.kv_slots[start:stop].tolist() == slots
        assert plan.context_lengths[i] == positions[-1] + 1
        assert plan.samples[i] == (positions[-1] + 1 == len(expected.tokens))
        used = -(-int(plan.context_lengths[i]) // BLOCK)
        assert plan.block_tables[i, :used].tolist() == expected.blocks[:used]

    @invariant()
    def consistent(self) -> None:
        self.batch.check()
        assert [sequence.id for sequence in self.batch.rows] == list(self.model)
        for sequence in self.batch.rows:
            expected = self.model[sequence.id]
            assert sequence.token_ids[: sequence.length].tolist() == expected.tokens
            assert sequence.remaining == expected.remaining


TestAnyRun = AnyRun.TestCase


TestAnyRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(1, 12))
def test_chunks_of_any_size_compute_every_prompt_once(prompts: list[int], budget: int) -> None:
    batch = new_batch()
    for i, length in enumerate(prompts, start=1):
        batch.add(row(i, [11] * length, 2))
    steps: list[int] = []
    while len(batch):
        plan = batch.plan(budget)
        assert plan is not None and len(plan.token_ids) <= budget
        steps.append(len(plan.token_ids))
        batch.settle(plan, answer(plan))
    # Every prompt token, and the first of the two new ones, is computed exactly once.
    assert sum(steps) == sum(prompts) + len(prompts)


def token_of(sequence: int, position: int) -> int:
    """What a model would say there: a few different tokens, and EOS now and then."""
    return EOS + (7 * sequence + 3 * position + position // 5) % 9


def chosen_for(plan: StepPlan) -> StepResult:
    ends = plan.context_lengths.tolist()
    rows = [
        RowResult((token_of(row.id, end),), (-1.0,)) if samples else RowResult()
        for row, end, samples in zip(plan.rows, ends, plan.samples.tolist(), strict=True)
    ]
    return StepResult.of(rows, 0, 0)


def run_ahead(batch: Batch, budget: int) -> dict[int, list[int]]:
    """Run to the end, always planning a step before the result of the last one is settled."""
    said: dict[int, list[int]] = {}
    before: tuple[StepPlan, StepResult] | None = None
    while True:
        plan = batch.plan(budget)
        if plan is not None and plan.inputs is not None and before is not None:
            ids = before[1].choices.rows
            plan.token_ids = plan.token_ids.copy()
            for at in np.flatnonzero(plan.inputs >= 0).tolist():
                plan.token_ids[at] = ids[plan.inputs[at]].token_ids[0]
        if before is not None:
            for sequence in batch.settle(*before).dropped:
                said[sequence.id] = sequence.token_ids[: sequence.length].tolist()
            if plan is None:
                before = None
                continue
        if plan is None:
            return said
        for sequence, starts in zip(plan.rows, pairwise(plan.query_starts.tolist()), strict=True):
            known = slice(int(plan.positions[starts[0]]), int(plan.positions[starts[1] - 1]) + 1)
            assert plan.token_ids[slice(*starts)].tolist() == sequence.token_ids[known].tolist()
        batch.expect(plan)
        before = (plan, chosen_for(plan))


def run_in_turns(batch: Batch, budget: int) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {}
    while (plan := batch.plan(budget)) is not None:
        for sequence in batch.settle(plan, chosen_for(plan)).dropped:
            said[sequence.id] = sequence.token_ids[: sequence.length].tolist()
    return said


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    budget=st.integers(1, 12),
)
def test_planning_ahead_of_results_changes_no_token(
    prompts: list[tuple[int, int]], budget: int
) -> None:
    ends = []
    for run in (run_in_turns, run_ahead):
        batch = new_batch()
        for i, (length, new) in enumerate(prompts, start=1):
            batch.add(row(i, [11] * length, new))
        ends.append(run(batch, budget))
        assert not len(batch)
        batch.check()
    assert ends[0] == ends[1]
    assert len(ends[0]) == len(prompts)


def test_a_row_that_leaves_while_its_step_runs_is_void() -> None:
    batch = new_batch()
    for i in (1, 2, 3):
        batch.add(row(i, [10 * i], 9))
    plan = batch.plan(100)
    assert plan is not None
    batch.expect(plan)
    batch.remove([2])
    moved = batch.settle(plan, answer(plan))
    assert moved.columns["sequence"].tolist() == [1, 3]
    assert not moved.dropped and not moved.faults
    batch.check()
