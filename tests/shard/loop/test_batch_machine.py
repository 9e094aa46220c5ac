"""Any run of the running set: commands and steps in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.shard.batch_support import EOS, answer, new_batch
from tests.shard.scripted_router import BLOCK, row
from tgi_trio.ipc.messages import ExtendRow, Finish, StepReport
from tgi_trio.shard.step import StepPlan


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
        report = StepReport(1, 1)
        self.batch.advance(plan, answer(plan, token), report)
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
        batch.advance(plan, answer(plan), StepReport(1, 1))
    # Every prompt token, and the first of the two new ones, is computed exactly once.
    assert sum(steps) == sum(prompts) + len(prompts)
