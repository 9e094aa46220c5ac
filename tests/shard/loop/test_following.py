"""Steps behind others whose drafts nobody has judged: what is planned, and where rows then are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.shard.loop.batch_support import BUDGET, new_batch
from tests.shard.loop.scripted_router import BLOCK, row
from tgi_trio.ipc.messages import ExtendRow
from tgi_trio.shard.contract import (
    RowResult,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.plan_parts import fill_inputs
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.payoff import Payoff

MOST = 3


def said(sequence: int, position: int) -> int:
    """Return the token that a sequence has at a position."""
    return 10 + (7 * sequence + 11 * position) % 60


class Runner:
    """Drafts by itself, some of the time rightly; knows what the batch does not."""

    follows = True

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.judged: list[tuple[int, int]] = []

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        counts = self.follow(rows, spare)
        for place, sequence, _ in rows:
            end = sequence.length + counts.get(place, 0)
            sequence.token_ids[sequence.length : end] = 99
        return counts

    def follow(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        found = {r.place: min(MOST, r.room, self.chance.randint(0, 3)) for r in rows}
        return {place: count for place, count in found.items() if count}

    def judge(self, sequence: ShardSequence, count: int, right: int) -> None:
        self.judged.append((count, right))

    def launch(self, plan: StepPlan) -> list[int]:
        """Return how many drafts of each row are right."""
        drafts = [0] * len(plan.rows) if plan.drafts is None else plan.drafts.tolist()
        return [self.chance.randint(0, count) for count in drafts]


def result_of(plan: StepPlan, rights: list[int]) -> StepResult:
    results = []
    for i, (own, right) in enumerate(zip(plan.rows, rights, strict=True)):
        next_one = int(plan.positions[plan.query_starts[i]]) + 1
        if plan.prefills is not None and plan.prefills[i]:
            next_one = int(plan.context_lengths[i])
        tokens = tuple(said(own.id, next_one + j) for j in range(right + 1))
        results.append(RowResult(tokens, (-1.0,) * len(tokens)))
    return StepResult.of(results, 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_where_their_right_drafts_have_taken_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they wait for blocks, or end while the next step runs; blocks are their own."""
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    runner = Runner(seed)
    batch = new_batch(drafter=runner)
    for i in range(3):
        ids = [said(i, place) for place in range(2 + i)]
        batch.add(row(i, ids, 20 + i, blocks=[10 * i + 1, 10 * i + 2]))
    rows, moved, granted = batch.rows, 0, {i: 2 for i in range(3)}

    def settle(plan: StepPlan, rights: list[int]) -> None:
        result = result_of(plan, rights)
        assert not batch.settle(plan, result).faults

    flown: tuple[StepPlan, list[int]] | None = None
    while len(batch):
        plan = batch.plan(BUDGET)
        rights = None if plan is None else runner.launch(plan)
        if flown is not None:
            settle(*flown)
            flown = None
        if plan is None or rights is None:
            for i, blocks in granted.items():  # what the router does
                if i in batch and blocks < 8:
                    batch.extend(ExtendRow(i, [10 * i + blocks + 1]))
                    granted[i] += 1
            continue
        moved += plan.moves
        batch.settle_positions(plan)
        for i, own in enumerate(plan.rows):
            span = slice(int(plan.query_starts[i]), int(plan.query_starts[i + 1]))
            if own.id in batch and plan.inputs is not None:
                assert plan.positions[span.start] == own.length - 1
                slots = [
                    own.block_ids[place // BLOCK] * BLOCK + place % BLOCK
                    for place in plan.positions[span].tolist()
                ]
                assert plan.kv_slots[span].tolist() == slots
                assert plan.context_lengths[i] == plan.positions[span][-1] + 1
        if batch.is_followed(plan) and plan.prefills is not None and not plan.prefills.any():
            batch.expect(plan)
            flown = (plan, rights)
        else:
            settle(plan, rights)
            batch.check()
    assert moved > 3 and runner.judged
    for i, own in enumerate(rows):
        assert own.length == 2 + i + 20 + i
        assert own.token_ids[: own.length].tolist() == [said(i, p) for p in range(own.length)]


def test_a_step_that_cannot_be_moved_is_computed_without_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    runner = Runner(1)
    monkeypatch.setattr(runner, "follow", lambda rows, spare: {r.place: 2 for r in rows})
    batch = new_batch(drafter=runner)
    batch.add(row(0, [said(0, 0), said(0, 1)], 20))
    first = batch.plan(BUDGET)
    assert first is not None
    batch.settle(first, result_of(first, [0]))
    drafted = batch.plan(BUDGET)
    assert drafted is not None and drafted.drafts is not None and not drafted.moves
    batch.expect(drafted)
    plan = batch.plan(BUDGET)
    assert plan is not None and plan.moves and plan.drafts is not None
    batch.settle(drafted, result_of(drafted, [1]))
    batch.settle_positions(plan)
    fill_inputs(plan)
    assert plan.drafts is None and plan.inputs is None and plan.query_starts.tolist() == [0, 1]
    assert plan.positions.tolist() == [4] and plan.context_lengths.tolist() == [5]
    assert plan.token_ids.tolist() == [said(0, 4)]


def test_drafts_follow_a_step_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is read first where only the runner has found something to draft."""
    resting = [False]
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: not resting[0])
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: resting[0])
    runner = Runner(1)
    monkeypatch.setattr(runner, "follow", lambda rows, spare: {})
    batch = new_batch(drafter=runner)
    batch.add(row(0, [said(0, 0), said(0, 1)], 20))
    first = batch.plan(BUDGET)
    assert first is not None and not first.leads and not batch.is_followed(first)
    batch.settle(first, result_of(first, [0]))
    plain = batch.plan(BUDGET)
    assert plain is not None and plain.drafts is None
    assert plain.leads and batch.is_followed(plain)
    batch.expect(plain)
    monkeypatch.setattr(runner, "follow", lambda rows, spare: {0: 2})
    plan = batch.plan(BUDGET)
    assert plan is not None and plan.moves and plan.leads and plan.counts.draft_tokens == 2
    batch.settle(plain, result_of(plain, [0]))
    batch.settle_positions(plan)
    assert plan.positions.tolist() == [3, 4, 5]
    resting[0] = True
    batch.expect(plan)
    last = batch.plan(BUDGET)
    assert last is not None and last.moves and last.drafts is None and not last.leads
