"""Slots of states: which a step reads and writes, behind drafts, retries, snapshots and prefixes.

The made-up model's state is a number that depends on every token; it faults a row whose slot holds
another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.shard.moved_tokens import tokens_of
from tgi_trio.ipc.messages import PrefillRow, StateGrant
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.plan_parts import slice_plan
from tgi_trio.shard.runner import DraftRow
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings, continuation, next_token

SETTINGS = FakeSettings(block_size=4, blocks=64, state_slots=12, vocab_size=100)
PROMPT = list(range(10, 31))


class ShareDrafter:
    """A drafter whose drafts are right as often as `share` says."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share = share
        self._rng = random.Random(seed)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        found = {}
        for place, sequence, room in rows:
            for known in range(sequence.length, sequence.length + min(2, room)):
                ids = sequence.token_ids[:known].tolist()
                right = next_token(SETTINGS, ids, sequence.prompt_length)
                wrong = self._rng.random() >= self._share
                sequence.token_ids[known] = right - 1 if wrong else right
                found[place] = known + 1 - sequence.length
        return found


def serve(share: float | None = None, seed: int = 0) -> tuple[Batch, FakeRunner]:
    runner = FakeRunner(SETTINGS)
    found = runner.warm_up(WarmupRequest(64, 64, 8, 0))
    batch = Batch(
        vocab_size=100,
        block_size=4,
        blocks=found.blocks,
        eos_ids=(2,),
        state_slots=found.state_slots,
        drafter=None if share is None else ShareDrafter(share, seed),
        draft_budget=64,
        clock=lambda: 0,
    )
    return batch, runner


def prefill(
    id: int, states: StateGrant | None, *, first_block: int = 1, cached: int = 0, new: int = 12
) -> PrefillRow:
    return PrefillRow(
        sequence=id,
        token_ids=np.array(PROMPT, np.int32),
        prompt_length=len(PROMPT),
        cached_length=cached,
        block_ids=list(range(first_block, first_block + 10)),
        max_new_tokens=new,
        states=states,
    )


def run(batch: Batch, runner: FakeRunner, budget: int = 64) -> list[tuple[StepPlan, list[int]]]:
    """Run to the end: every plan, and the tokens it brought its only row."""
    steps = []
    while (plan := batch.plan(budget)) is not None:
        moved = batch.settle(plan, runner.step(plan))
        assert not moved.faults
        batch.check()
        steps.append((plan, list(moved.columns["token_ids"])))
    return steps


def test_a_sequence_reads_one_of_its_slots_and_writes_the_other() -> None:
    batch, runner = serve()
    batch.add(prefill(1, StateGrant((3, 5))))
    steps = run(batch, runner, budget=8)
    slots = [(plan.state_reads, plan.state_writes) for plan, _ in steps]
    pairs = [(int(r[0]), int(w[0])) for r, w in slots if r is not None and w is not None]
    assert pairs == ([(5, 3), (3, 5)] * len(pairs))[: len(steps)]
    tokens = [token for _, found in steps for token in found]
    assert tokens == continuation(SETTINGS, PROMPT, 12)


def test_a_step_ends_where_states_are_saved_and_another_sequence_goes_on_from_there() -> None:
    batch, runner = serve()
    batch.add(prefill(1, StateGrant((3, 5), saves=((8, 7), (20, 9))), new=4))
    steps = run(batch, runner)
    written = [plan.state_writes for plan, _ in steps[:3]]
    assert [int(plan.context_lengths[0]) for plan, _ in steps[:3]] == [8, 20, 21]
    assert [int(slots[0]) for slots in written[:2] if slots is not None] == [7, 9]
    # The first five blocks hold 20 tokens, whose K and V stay; states are those behind 8.
    again = prefill(2, StateGrant((1, 2), source=7, held_length=20), cached=8, new=4)
    before = runner._kv.copy()
    batch.add(again)
    others = run(batch, runner)
    assert [int(plan.positions[0]) for plan, _ in others[:2]] == [8, 21]
    assert others[0][0].kv_slots[:12].max() < 4  # of the null block
    assert np.array_equal(runner._kv[4:24], before[4:24])
    assert [t for _, found in others for t in found] == continuation(SETTINGS, PROMPT, 4)


def test_behind_a_wrong_draft_the_right_tokens_are_computed_again() -> None:
    batch, runner = serve(share=0.0)
    batch.add(prefill(1, StateGrant((3, 5)), new=3))
    plans = []
    for _ in range(3):
        plan = batch.plan(64)
        assert plan is not None and plan.state_reads is not None
        plans.append(plan)
        assert not batch.settle(plan, runner.step(plan)).faults
    drafted, again = plans[1:]
    assert drafted.drafts is not None and again.drafts is None
    assert again.positions.tolist() == [21, 22]  # the token that was drafted from, and the right
    assert drafted.state_reads is not None and again.state_reads is not None
    assert drafted.state_reads.tolist() == again.state_reads.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_right_whatever_is_drafted_cut_and_computed_twice(seed: int) -> None:
    rng = random.Random(seed)
    batch, runner = serve(share=rng.choice([0.3, 0.9]), seed=seed)
    batch.add(prefill(1, StateGrant((1, 2), saves=((4, 3),)), new=14))
    batch.add(prefill(2, StateGrant((4, 5), saves=((12, 6), (20, 7))), first_block=20, new=14))
    texts: dict[int, list[int]] = {1: [], 2: []}
    drafted = 0
    while (plan := batch.plan(rng.randint(1, 30))) is not None:
        drafted += plan.counts.draft_tokens
        result = runner.step(plan)
        if rng.random() < 0.3:  # as the worker does with a step that has raised
            for row in range(len(plan.rows)):
                assert not runner.step(slice_plan(plan, row, row + 1)).choices.faults
        moved = batch.settle(plan, result)
        assert not moved.faults
        batch.check()
        for id, found in tokens_of(moved):
            texts[id] += found
    assert drafted
    assert texts == {id: continuation(SETTINGS, PROMPT, 14) for id in texts}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prefill(1, None), "no slots"),
        (prefill(1, StateGrant((3, 12))), "granted may be 1 to 11, each once"),
        (prefill(1, StateGrant((3, 3))), "each once"),
        (prefill(1, StateGrant((3, 4), source=3), cached=8), "each once"),
        (prefill(1, StateGrant((3, 4)), cached=8), "8 tokens cached, states from 0"),
        (prefill(1, StateGrant((3, 4), source=5)), "0 tokens cached, states from 5"),
        (prefill(1, StateGrant((3, 4), saves=((8, 5), (8, 6)))), "states saved behind"),
        (prefill(1, StateGrant((3, 4), saves=((21, 5),))), "states saved behind"),
    ],
)
def test_slots_that_cannot_be_are_refused(row: PrefillRow, message: str) -> None:
    batch, _ = serve()
    with pytest.raises(ValueError, match=message):
        batch.add(row)
