"""The running set: what is planned, what a result moves, and that both stay consistent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.shard.loop.batch_support import BUDGET, EOS, advance, answer, new_batch, step
from tests.shard.loop.scripted_router import BLOCK, row
from tgi_trio.ipc.messages import ExtendRow, Fault, Finish
from tgi_trio.shard.contract import (
    RowResult,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.plan_parts import slice_plan
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.sharing import share_drafts


class Counting:
    """A drafter that drafts 50, 51, ..., three a step."""

    def __init__(self, trusted: Mapping[int, int] | None = None) -> None:
        self._trusted = trusted or {}

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        return share_drafts(rows, spare, trust=self.trust, draft=self.draft)

    def trust(self, sequence: ShardSequence) -> int:
        return self._trusted.get(sequence.id, 0)

    def draft(self, sequence: ShardSequence, room: int) -> int:
        count = min(3, room)
        sequence.token_ids[sequence.length : sequence.length + count] = range(50, 50 + count)
        return count


# --- plans ---------------------------------------------------------------------------------------


def test_a_prefill_is_laid_out_flat() -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12, 13, 14, 15], 3, blocks=[9, 4]))
    batch.add(row(2, [21, 22], 3, blocks=[7, 3]))
    plan = batch.plan(BUDGET)
    assert plan is not None
    assert [sequence.id for sequence in plan.rows] == [2, 1]
    assert plan.token_ids.tolist() == [21, 22, 11, 12, 13, 14, 15]
    assert plan.positions.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert plan.kv_slots.tolist() == [28, 29, 36, 37, 38, 39, 16]
    assert plan.query_starts.tolist() == [0, 2, 7]
    assert plan.context_lengths.tolist() == [2, 5]
    assert plan.block_tables.tolist() == [[7, 3], [9, 4]]
    assert plan.samples.tolist() == [True, True]
    types = {name: str(getattr(plan, name).dtype) for name in ("token_ids", "kv_slots", "samples")}
    assert types == {"token_ids": "int64", "kv_slots": "int64", "samples": "bool"}


def test_a_held_sequence_sits_steps_out_and_does_not_count_as_stalled() -> None:
    batch = new_batch()
    for sequence in (1, 2, 3):
        batch.add(row(sequence, [11, 12], 9))
    batch.hold(2)
    assert step(batch)[0].sequence == [1, 3]
    assert [sequence.id for sequence in batch.held] == [2]
    batch.remove([1])  # the others move up, and what is held stays so
    assert step(batch)[0].sequence == [3]
    assert batch.counts.stalled_rows == 0
    batch.hold(2, False)
    assert sorted(step(batch)[0].sequence) == [2, 3]
    batch.hold(2)
    batch.remove([3])
    assert batch.plan(BUDGET) is None
    assert batch.counts.stalled_rows == 0


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    batch = new_batch()
    batch.add(row(1, list(range(20, 50)), 3))
    batch.add(row(2, [51, 52, 53], 3))
    plan = batch.plan(8)
    assert plan is not None
    assert [sequence.id for sequence in plan.rows] == [2, 1]
    assert plan.token_ids.tolist() == [51, 52, 53, 20, 21, 22, 23, 24]


def test_decode_rows_come_first_and_equal_prompts_go_in_admission_order() -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12], 9))
    step(batch)
    batch.add(row(2, list(range(20, 30)), 3))
    batch.add(row(3, list(range(30, 40)), 3))
    plan = batch.plan(8)
    assert plan is not None
    assert [sequence.id for sequence in plan.rows] == [1, 2]
    assert plan.token_ids.tolist() == [7, 20, 21, 22, 23, 24, 25, 26]
    assert plan.samples.tolist() == [True, False]
    assert (batch.counts.decode_rows, batch.counts.prefill_tokens) == (1, 7)
    batch.settle(plan, answer(plan))
    plan = batch.plan(8)
    assert plan is not None
    assert plan.token_ids.tolist() == [7, 27, 28, 29, 30, 31, 32, 33]
    assert plan.samples.tolist() == [True, True, False]


def test_a_cached_prefix_is_not_computed_again() -> None:
    batch = new_batch()
    batch.add(row(1, list(range(10, 20)), 3, cached=8))
    plan = batch.plan(BUDGET)
    assert plan is not None
    assert plan.token_ids.tolist() == [18, 19]
    assert plan.context_lengths.tolist() == [10]


def test_a_row_without_blocks_sits_out_until_it_is_extended() -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12, 13], 9, blocks=[5]))
    batch.add(row(2, [21], 9, blocks=[6, 7]))
    assert step(batch)[0].sequence == [2, 1]
    assert step(batch)[0].sequence == [1, 2]  # writes slot 3 of block 5, the last
    assert step(batch)[0].sequence == [2]
    assert batch.counts.stalled_rows == 1
    batch.extend(ExtendRow(1, [8]))
    batch.extend(ExtendRow(99, [9]))
    plan = batch.plan(BUDGET)
    assert plan is not None
    assert [sequence.id for sequence in plan.rows] == [1, 2]
    assert plan.kv_slots.tolist() == [8 * BLOCK, 6 * BLOCK + 3]
    assert batch.counts.stalled_rows == 0


def test_a_prefill_goes_as_far_as_its_blocks() -> None:
    batch = new_batch()
    batch.add(row(1, list(range(10, 20)), 9, blocks=[5, 6]))
    report, _ = step(batch)
    assert (report.computed, report.token_count) == ([8], [0])
    assert batch.plan(BUDGET) is None
    assert batch.counts.stalled_rows == 1


def test_an_empty_batch_has_no_plan_and_a_budget_of_0_still_moves() -> None:
    batch = new_batch()
    assert batch.plan(BUDGET) is None
    batch.add(row(1, [11, 12], 9))
    plan = batch.plan(0)
    assert plan is not None and plan.token_ids.tolist() == [11]


def test_commands_after_a_plan_do_not_change_it() -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12], 9, blocks=[5]))
    plan = batch.plan(BUDGET)
    assert plan is not None
    before = plan.block_tables.copy()
    batch.extend(ExtendRow(1, [6]))
    batch.remove([1])
    batch.add(row(2, [21], 9, blocks=[8]))
    assert plan.block_tables.tolist() == before.tolist()


def test_a_slice_of_a_plan_is_a_plan() -> None:
    batch = new_batch()
    for i in range(1, 5):
        batch.add(row(i, list(range(10 * i, 11 * i + 1)), 9))
    plan = batch.plan(BUDGET)
    assert plan is not None
    part = slice_plan(plan, 1, 3)
    assert [sequence.id for sequence in part.rows] == [2, 3]
    assert part.query_starts.tolist() == [0, 3, 7]
    assert part.token_ids.tolist() == [20, 21, 22, 30, 31, 32, 33]
    assert part.context_lengths.tolist() == [3, 4]
    assert len(part.block_tables) == len(part.samples) == 2


# --- results -------------------------------------------------------------------------------------


def test_length_is_tested_before_eos() -> None:
    batch = new_batch()
    batch.add(row(1, [11], 1))
    batch.add(row(2, [21], 2))
    report, dropped = step(batch, EOS)
    assert report.finish == [Finish.LENGTH, Finish.EOS]
    assert report.token_ids == [EOS, EOS]
    assert dropped == [1, 2] and len(batch) == 0


def test_ignore_eos_and_min_new_tokens() -> None:
    batch = new_batch()
    batch.add(row(1, [11], 3, ignore_eos=True))
    batch.add(row(2, [21], 9, min_new_tokens=2))
    reports = [step(batch, EOS)[0] for _ in range(3)]
    assert [report.finish for report in reports] == [[0, 0], [0, 0], [Finish.LENGTH, Finish.EOS]]


def test_a_row_has_ends_of_its_own() -> None:
    """Which end no other, whether rows move together or each by itself."""
    batch, own = new_batch(), 33
    batch.add(row(1, [11], 9))
    batch.add(row(2, [21], 9, ends=(own,), min_new_tokens=1))
    batch.add(row(3, [31], 9, ends=(own,), ignore_eos=True))
    assert step(batch, own)[0].finish == [0, 0, 0]
    assert step(batch, 7)[0].finish == [0, 0, 0]
    assert step(batch, own)[0].finish == [0, Finish.EOS, 0]
    assert step(batch, own)[0].finish == [0, 0]  # as many tokens that end nothing as rows
    batch.add(row(4, [41, 42], 9, ends=(own,)))
    plan = batch.plan(BUDGET)
    assert plan is not None
    several = {1: (own, own), 3: (own, own), 4: (30, own, 34)}  # as with drafts
    results = [RowResult(several[each.id], (-1.0,) * len(several[each.id])) for each in plan.rows]
    report, _ = advance(batch, plan, StepResult.of(results, 0, 0))
    assert dict(zip(report.sequence, report.finish, strict=True)) == {1: 0, 3: 0, 4: Finish.EOS}
    assert dict(zip(report.sequence, report.token_count, strict=True)) == {1: 2, 3: 2, 4: 2}


def test_a_buffer_grows_with_its_sequence() -> None:
    batch = new_batch()
    batch.add(row(1, [11], 1000, blocks=range(1, 300)))
    for _ in range(999):
        step(batch)
    assert batch.rows[0].token_ids[: batch.rows[0].length].tolist() == [11] + [7] * 999


def test_several_tokens_are_cut_at_the_finishing_one() -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12], 9))
    batch.add(row(2, [21, 22], 9))
    plan = batch.plan(BUDGET)
    assert plan is not None
    tops = [[(30, -1.0)], [(31, -1.0), (32, -2.0)], [(33, -1.0)]]
    results = [
        RowResult((30, EOS, 33), (-1.0, -2.0, -3.0), tops),
        RowResult((40, 41), (-1.0, -2.0)),
    ]
    report, _ = advance(batch, plan, StepResult.of(results, 0, 0))
    assert report.token_ids == [30, EOS, 40, 41]
    assert report.finish == [Finish.EOS, Finish.NONE]
    assert report.computed == [3, 3]
    assert (report.top_count, report.top_ids) == ([1, 2, 0, 0], [30, 31, 32])
    batch.check()
    plan = batch.plan(BUDGET)
    assert plan is not None
    assert (plan.token_ids.tolist(), plan.positions.tolist()) == ([41], [3])


# --- drafts -------------------------------------------------------------------------------------


def drafted(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [0] * len(plan.rows) if plan.drafts is None else plan.drafts.tolist()


def test_drafts_follow_the_last_known_token_of_rows_that_decode() -> None:
    batch = new_batch(drafter=Counting())
    batch.add(row(1, [11, 12], 9, blocks=[5, 9, 4]))
    assert drafted(batch.plan(BUDGET)) == [0]  # it prefills
    step(batch)
    batch.add(row(2, [21, 22, 23], 9))
    plan = batch.plan(BUDGET)
    assert plan is not None and drafted(plan) == [3, 0]
    assert plan.token_ids.tolist() == [7, 50, 51, 52, 21, 22, 23]
    assert plan.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert plan.kv_slots[:4].tolist() == [22, 23, 36, 37]
    assert plan.context_lengths.tolist() == [6, 3]
    assert plan.samples.tolist() == [True, True]
    counts = batch.counts
    assert (counts.decode_rows, counts.draft_tokens, counts.prefill_tokens) == (1, 3, 3)
    half = slice_plan(plan, 0, 1)
    assert half.drafts is not None and half.drafts.tolist() == [3]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_row_is_computed_as_far_as_its_drafts_were_right(right: int) -> None:
    batch = new_batch(drafter=Counting())
    batch.add(row(1, [11, 12], 9, blocks=[5, 9, 4]))
    step(batch)
    plan = batch.plan(BUDGET)
    assert plan is not None
    tokens = (*(50, 51, 52)[:right], 8)
    got = RowResult(tokens, (-1.0,) * len(tokens))
    report, _ = advance(batch, plan, StepResult.of([got], 0, 0))
    batch.check()
    assert (report.computed, report.token_count) == ([3 + right], [1 + right])
    plan = batch.plan(BUDGET)
    assert plan is not None
    assert (plan.token_ids[0], plan.positions[0]) == (8, 3 + right)  # a wrong draft's K is redone


def test_a_row_drafts_no_further_than_its_blocks_its_tokens_and_the_budget() -> None:
    batch = new_batch(drafter=Counting())
    batch.add(row(1, [11, 12], 9, blocks=[5, 6]))
    batch.add(row(2, [21, 22], 3, blocks=[7, 8]))
    batch.add(row(3, [31, 32], 9, blocks=[9]))
    step(batch)
    assert drafted(batch.plan(BUDGET)) == [3, 1, 1]  # 3: two tokens left; its block is nearly full
    assert drafted(batch.plan(5)) == [1, 1, 0]
    assert drafted(batch.plan(3)) == [0, 0, 0]
    assert drafted(batch.plan(2)) == [0, 0]


@pytest.mark.parametrize(
    ("cheap", "expected"),
    [(4, [0, 0, 0, 0]), (5, [0, 0, 1, 0]), (8, [1, 1, 1, 1]), (11, [2, 2, 2, 1]), (16, [3] * 4)],
)
def test_drafts_share_the_tokens_that_cost_little(cheap: int, expected: list[int]) -> None:
    batch = new_batch(drafter=Counting(trusted={2: 1, 3: 2}), draft_budget=cheap)
    for i in range(1, 5):
        batch.add(row(i, [10 * i], 9))
    step(batch)
    assert drafted(batch.plan(BUDGET)) == expected  # the third before the second before the others


def test_what_a_row_does_not_draft_goes_to_those_after_it() -> None:
    batch = new_batch(drafter=Counting(), draft_budget=6)
    batch.add(row(1, [11, 12], 2))  # its next token is the last
    batch.add(row(2, [21, 22], 9))
    step(batch)
    assert drafted(batch.plan(BUDGET)) == [0, 3]


def test_nothing_is_drafted_beside_a_prompt_that_fills_the_step() -> None:
    batch = new_batch(drafter=Counting(), draft_budget=8)
    batch.add(row(1, [11, 12], 9))
    step(batch)
    batch.add(row(2, list(range(20, 27)), 9))
    assert drafted(batch.plan(BUDGET)) == [0, 0]
    step(batch)
    assert drafted(batch.plan(BUDGET)) == [3, 3]


def test_a_faulty_row_is_dropped_alone() -> None:
    batch = new_batch()
    for i in (1, 2, 3):
        batch.add(row(i, [10 * i], 9))
    plan = batch.plan(BUDGET)
    assert plan is not None
    rows = answer(plan).rows
    rows[1] = RowResult(fault="out of luck")
    report, moved = advance(batch, plan, StepResult.of(rows, 0, 0))
    assert moved.faults == [Fault(2, "out of luck")]
    assert [sequence.id for sequence in moved.dropped] == [2]
    assert report.sequence == [1, 3]
    batch.check()


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_runner_that_breaks_the_contract_faults_the_row(chunk: int) -> None:
    batch = new_batch()
    batch.add(row(1, [11, 12, 13], 9))
    plan = batch.plan(chunk)
    assert plan is not None
    wrong = RowResult((7,), (-1.0,)) if chunk == 1 else RowResult()
    faults = batch.settle(plan, StepResult.of([wrong], 0, 0)).faults
    assert faults[0].sequence == 1 and "none where one was" in faults[0].message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(1, [11], 3), "held already"),
        (row(5, [11, 12], 3, cached=2), "2 of 2 tokens cached"),
        (row(5, [], 3), "0 of 0 tokens cached"),
        (row(5, [11], 0), "at least 1 token"),
        (row(5, [11, 100], 3), "from 11 to 100; the model has 0 to 99"),
        (row(5, [-1], 3), "from -1 to -1"),
        (row(5, [11], 3, blocks=[0]), r"blocks \[0\]; granted may be 1 to 9999"),
        (row(5, [11], 3, blocks=[10_000]), r"\[10000\]"),
        (row(5, [11] * 9, 3, blocks=[1], cached=5), "do not fit 1 blocks"),
        (row(5, [11], 3, prompt_length=2), "prompt of 2"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused(bad: object, message: str) -> None:
    batch = new_batch()
    batch.add(row(1, [11], 3))
    with pytest.raises(ValueError, match=message):
        batch.add(bad)  # type: ignore[arg-type]
    batch.check()
    assert [sequence.id for sequence in batch.rows] == [1]


def test_nothing_is_taken_in_before_there_is_a_cache() -> None:
    with pytest.raises(ValueError, match="before WARMUP"):
        Batch(vocab_size=100, block_size=BLOCK, blocks=0, eos_ids=[]).add(row(1, [11], 3))


def test_check_names_what_is_wrong() -> None:
    batch = new_batch()
    sequence = batch.add(row(1, [11, 12], 9))
    sequence.block_ids.append(77)
    with pytest.raises(AssertionError, match="sequence 1: wrong granted, table"):
        batch.check()
