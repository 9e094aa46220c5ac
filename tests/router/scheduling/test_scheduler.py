"""The scheduler against a little model shard: order, budgets, cancellation."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.router.scheduling.harness import LIMITS, Pair, expected, limits, request
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.errors import Overloaded, ValidationError
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import Fault, SamplingParameters, StepReport
from tgi_trio.router.scheduling import (
    Filter,
    Limits,
    Prefill,
    Scheduler,
)
from tgi_trio.router.scheduling.report_columns import prompt_tops_per_row


def test_one_request_runs_to_its_length() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(7, request(5, 3), 0.0)
    commands = pair.send()
    assert [type(c) for c in commands] == [Limits, Prefill]
    assert [c.number for c in commands] == [1, 2]
    assert len(commands[1].rows[0].block_ids) == 2  # 5 + 3 - 1 tokens
    first = pair.commit(pair.shard.step())
    assert first[0].first and len(first[0].token_ids) == 1
    second = pair.step()
    assert not second[0].first
    pair.run()
    assert pair.tokens == {7: expected(5, 3)}
    assert pair.finished == {7: Finish.LENGTH}
    assert pair.scheduler.free_blocks == pair.scheduler.total_blocks == 64


def test_schedule_says_nothing_when_nothing_changes() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(5, 10), 0.0)
    pair.send()
    assert pair.scheduler.schedule(0.0) == []
    pair.commit(pair.shard.step())
    assert pair.scheduler.schedule(1.0) == []


def test_queue_is_first_in_first_out() -> None:
    pair = Pair(limits(max_batch_size=2))
    for i in range(5):
        pair.scheduler.add(i, request(4, 2 + i), 0.0)
    pair.send()
    assert list(pair.shard.rows) == [0, 1]
    assert pair.scheduler.batch_size == 2 and pair.scheduler.queue_size == 3
    pair.run()
    assert pair.tokens == {i: expected(4, 2 + i) for i in range(5)}


def test_prefill_budget_holds_admission_back() -> None:
    pair = Pair(limits(max_batch_prefill_tokens=20, token_budget=8))
    for i in range(3):
        pair.scheduler.add(i, request(16, 2), 0.0)
    pair.send()
    assert list(pair.shard.rows) == [0, 1]  # 16 < 20, 32 is not: the second is cut in chunks
    pair.run()
    assert pair.tokens == {i: expected(16, 2) for i in range(3)}


def test_a_small_request_passes_a_large_one_only_so_often() -> None:
    pair = Pair(limits(blocks=11, skip_limit=3, max_batch_prefill_tokens=1000))
    pair.scheduler.add(0, request(4, 21), 0.0)  # 6 of 10 blocks
    pair.send()
    pair.scheduler.add(1, request(20, 5), 0.0)  # 6 blocks: has to wait
    for i in range(2, 20):
        pair.scheduler.add(i, request(2, 3), 0.0)  # 1 block each
    pair.send()
    assert list(pair.shard.rows) == [0, 2, 3, 4]
    while not (prefills := [c for c in pair.send() if isinstance(c, Prefill)]):
        pair.commit(pair.shard.step())
    assert prefills[0].rows[0].sequence == 1  # nobody passed it a fourth time
    pair.run()
    assert len(pair.finished) == 20


def test_short_prompts_pass_a_long_one_until_they_are_as_long_together() -> None:
    pair = Pair(
        limits(blocks=500, token_budget=8, max_batch_prefill_tokens=16, max_total_tokens=300)
    )
    pair.scheduler.add(0, request(100, 2), 0.0)
    pair.step()
    for id in range(1, 40):
        pair.scheduler.add(id, request(10, 1), 0.0)
    order: list[int] = []
    while len(pair.finished) < 40:
        pair.step()
        order += [id for id in pair.finished if id not in order]
    assert order[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]
    assert pair.tokens[0] == expected(100, 2)


def test_a_long_prompt_in_the_queue_is_passed_only_as_often() -> None:
    pair = Pair(
        limits(blocks=500, token_budget=8, max_batch_prefill_tokens=16, max_total_tokens=300)
    )
    pair.scheduler.add(0, request(60, 2), 0.0)
    pair.scheduler.add(1, request(60, 2), 0.0)  # not its turn: 60 tokens are before it
    for id in range(2, 40):
        pair.scheduler.add(id, request(10, 1), 0.0)
    order: list[int] = []
    while len(pair.finished) < 40:
        pair.step()
        order += [id for id in pair.finished if id not in order]
    assert set(order[:6]) == {2, 3, 4, 5, 6, 7}
    assert order.index(0) < order.index(1) <= 9


def test_queue_bounds() -> None:
    scheduler = Scheduler(limits(max_queued_requests=2, max_queued_tokens=10))
    scheduler.add(0, request(20), 0.0)  # an empty queue takes any valid request
    with pytest.raises(Overloaded) as caught:
        scheduler.add(1, request(1), 0.0)
    assert caught.value.retry_after > 0
    scheduler.schedule(0.0)
    scheduler.add(2, request(4), 0.0)
    scheduler.add(3, request(4), 0.0)
    with pytest.raises(Overloaded):
        scheduler.add(4, request(1), 0.0)
    scheduler.check()
    assert scheduler.queue_size == 2


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(LIMITS)
    with pytest.raises(ValidationError, match="--max-batch-total-tokens"):
        scheduler.add(0, request(64 * 4, 2), 0.0)
    scheduler.add(1, request(64 * 4 - 1, 2), 0.0)
    assert [type(c) for c in scheduler.schedule(0.0)] == [Limits, Prefill]


def test_abort_in_the_queue_is_gone_at_once() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(5), 0.0)
    assert pair.scheduler.abort(1, 0.0) is True
    assert pair.scheduler.abort(1, 0.0) is False
    assert pair.scheduler.abort(99, 0.0) is False
    assert [type(c) for c in pair.send()] == [Limits]
    assert pair.scheduler.queue_size == 0


def test_blocks_of_an_aborted_sequence_wait_for_the_acknowledgement() -> None:
    pair = Pair(limits(blocks=3))
    pair.scheduler.add(1, request(4, 5), 0.0)  # both blocks
    pair.send()
    behind = pair.shard.step()
    assert pair.scheduler.abort(1, 0.0) is True
    assert pair.scheduler.abort(1, 0.0) is False
    pair.scheduler.add(2, request(4, 5), 0.0)
    commands = pair.scheduler.schedule(0.0)
    assert [type(c) for c in commands] == [Filter]
    assert pair.commit(behind) == []  # a step from before the FILTER: nothing to tell
    assert pair.scheduler.schedule(0.0) == []
    pair.commit(pair.shard.step())  # the shard has not read the FILTER
    assert pair.scheduler.schedule(0.0) == [] and pair.scheduler.held_blocks == 2
    pair.shard.apply(commands)
    pair.commit(pair.shard.step())
    assert pair.scheduler.held_blocks == 0
    assert [type(c) for c in pair.send()] == [Prefill]
    pair.run()
    assert pair.tokens == {2: expected(4, 5)}


def test_a_sequence_that_ends_before_its_filter_is_freed_once() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(4, 1), 0.0)
    pair.send()
    last = pair.shard.step()
    pair.scheduler.abort(1, 0.0)
    commands = pair.send()
    assert [type(c) for c in commands] == [Filter]
    assert pair.commit(last) == []
    assert pair.scheduler.held_blocks == 0
    pair.step()
    assert pair.scheduler.find(1) is None


def test_no_filter_for_what_has_ended() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(4, 1), 0.0)
    pair.send()
    pair.scheduler.abort(1, 0.0)
    pair.commit(pair.shard.step())
    assert pair.send() == []


def test_finish_counts_as_success_and_drops_like_abort() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(4, 50), 0.0)
    pair.step()
    pair.scheduler.finish(1, 1.0)
    pair.scheduler.finish(1, 1.0)
    assert pair.scheduler.counters["finished"] == 1
    pair.run()
    assert pair.tokens == {1: expected(4, 1)}


def test_a_fault_ends_one_sequence_alone() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(4, 5), 0.0)
    pair.scheduler.add(2, request(6, 5), 0.0)
    pair.step()
    pair.scheduler.add(3, request(6, 5), 0.0)
    pair.send()
    for sequence in (1, 3):
        del pair.shard.rows[sequence]
    faults = [Fault(1, "bad grammar"), Fault(3, "worse"), Fault(77, "unknown")]
    assert pair.scheduler.fault(faults, pair.shard.applied, 1.0) == [1, 3]
    pair.scheduler.check()
    pair.run()
    assert pair.tokens[2] == expected(6, 5)


def test_a_lost_shard_is_a_pause() -> None:
    pair = Pair(limits(max_batch_size=3))
    for i in range(5):
        pair.scheduler.add(i, request(4 + i, 9), 0.0)
    for _ in range(4):
        pair.step()
    pair.scheduler.abort(1, 4.0)
    pair.scheduler.shard_lost(4.0)
    pair.scheduler.check()
    assert pair.scheduler.held_blocks == 0 and pair.scheduler.queue_size == 4
    pair.shard = ModelShard(4)
    commands = pair.send()
    assert [c.number for c in commands] == [1, 2]
    assert [row.sequence for row in commands[1].rows] == [0, 2, 3]  # started ones first
    assert len(commands[1].rows[0].token_ids) == 4 + 4
    pair.run()
    assert {i: pair.tokens[i] for i in (0, 2, 3, 4)} == {
        i: expected(4 + i, 9) for i in (0, 2, 3, 4)
    }


def test_what_another_server_has_begun_goes_on_here() -> None:
    """Before those that nobody reads yet, with the rest of its tokens."""
    pair = Pair(limits(max_batch_size=1, prefix_caching=True))
    whole = expected(10, 9)
    pair.scheduler.add(0, request(10, 9), 0.0)
    pair.run()
    pair.scheduler.add(1, request(4, 9), 0.0)
    for id, count in (2, 3), (3, 8):
        pair.scheduler.add(id, request(10, 9, emitted=tuple(whole[:count])), 0.0)
    (prefill,) = pair.send()
    (row,) = prefill.rows
    assert row.sequence == 2 and row.prompt_length == 10 and len(row.token_ids) == 13
    assert row.max_new_tokens == 6 and row.cached_length == 12
    found = pair.scheduler.find(2)
    assert found is not None and found.cached == 10  # of its prompt
    (progress,) = pair.step()
    assert progress.first
    pair.run()
    assert [pair.tokens[id] for id in range(4)] == [whole, expected(4, 9), whole[3:], whole[8:]]


def test_prompt_logprobs_come_once_even_when_replayed() -> None:
    sampling = SamplingParameters(ignore_eos=True, prompt_logprobs=True, prompt_top_n=2)
    pair = Pair(limits(token_budget=4))
    pair.scheduler.add(1, request(10, 3, sampling=sampling), 0.0)
    got: list[float] = []
    tops: list[object] = []
    for step in range(8):
        for part in pair.step():
            got += part.prompt_logprobs
            tops += map(list, part.prompt_tops)
        if step == 1:
            pair.scheduler.shard_lost(0.0)
            pair.shard = ModelShard(4)
    assert got == [-float(p) for p in range(10)]
    assert tops == [[(p, -1.0), (p + 1, -1.0)] for p in range(10)]
    assert pair.tokens[1] == expected(10, 3)


def test_each_prompt_logprob_has_its_own_top_tokens_whoever_else_has_any() -> None:
    """The one that asks for none prefills beside the other for a while, and then alone."""
    pair = Pair(limits(token_budget=8))
    for id, length, top in ((1, 5, 2), (2, 12, 0)):
        sampling = SamplingParameters(ignore_eos=True, prompt_logprobs=True, prompt_top_n=top)
        pair.scheduler.add(id, request(length, 2, sampling=sampling), 0.0)
    tops: dict[int, list[object]] = {1: [], 2: []}
    for _ in range(6):
        for part in pair.step():
            tops[part.sequence_id] += map(list, part.prompt_tops)
    assert tops == {1: [[(p, -1.0), (p + 1, -1.0)] for p in range(5)], 2: [[]] * 12}


def test_the_first_token_of_a_prompt_has_no_top_tokens_in_a_step_of_its_own_as_well() -> None:
    report = StepReport(1, 1, sequence=[1], computed=[1], token_count=[0], prompt_count=[1])
    report.prompt_logprobs, report.prompt_top_count = [float("nan")], [0]
    assert [[list(top) for top in row] for row in prompt_tops_per_row(report)] == [[[]]]


def test_an_end_without_a_token_is_an_end() -> None:
    pair = Pair(LIMITS)
    pair.scheduler.add(1, request(4, 5), 0.0)
    pair.send()
    pair.shard.rows.clear()
    report = StepReport(1, 2, sequence=[1], computed=[4], token_count=[0], prompt_count=[0])
    report.finish = [int(Finish.EOS)]
    assert pair.commit(report)[0].finish is Finish.EOS
    assert pair.scheduler.free_blocks == pair.scheduler.total_blocks


def test_deadlines() -> None:
    pair = Pair(limits(max_batch_size=1))
    assert pair.scheduler.next_deadline is None
    pair.scheduler.add(1, request(4, 50, deadline=5.0), 0.0)
    pair.scheduler.add(2, request(4, 50, deadline=3.0), 0.0)
    pair.scheduler.add(3, request(4, 50, deadline=2.0), 0.0)
    pair.step()
    pair.scheduler.abort(3, 0.0)
    assert pair.scheduler.next_deadline == 3.0
    assert pair.scheduler.expire(2.9) == []
    assert pair.scheduler.expire(5.0, 1) == [2]
    assert pair.scheduler.next_deadline == 5.0
    assert pair.scheduler.expire(5.0, 1) == [1]
    assert pair.scheduler.expire(5.0, 1) == []
    assert pair.scheduler.next_deadline is None
    pair.run()


def test_priorities_order_the_queue() -> None:
    pair = Pair(limits(max_batch_size=1))
    for i, priority in enumerate([0, 5, -1, 0]):
        pair.scheduler.add(i, request(4, 2, priority=priority), 0.0)
    order = []
    while len(pair.finished) < 4:
        pair.step()
        order += [i for i in pair.finished if i not in order]
    assert order == [2, 0, 3, 1]


@pytest.mark.parametrize("reserve", [True, False])
def test_ten_thousand_cancellations_leave_nothing_behind(reserve: bool) -> None:
    rng = random.Random(5)
    pair = Pair(
        limits(
            blocks=120 if reserve else 41,
            token_budget=24,
            max_batch_prefill_tokens=48,
            reserve=reserve,
            prefix_caching=not reserve,
            ask_ahead=2,
            grant_ahead=4,
            target_ttft=float("inf"),  # who is late hardly gets far enough to be pushed out
        )
    )
    alive: list[int] = []
    cancelled = number = 0
    ring: list[Any] = []  # commands may lie in it for a while
    while cancelled < 10_000:
        while len(alive) < 40:
            prompt = [number, *range(rng.randint(0, 20))]
            pair.scheduler.add(number, request(prompt, rng.randint(1, 30)), pair.now)
            alive.append(number)
            number += 1
        for _ in range(rng.randint(0, 4)):
            victim = alive.pop(rng.randrange(len(alive)))
            assert pair.scheduler.abort(victim, pair.now)
            assert not pair.scheduler.abort(victim, pair.now)
            cancelled += 1
        ring += pair.scheduler.schedule(pair.now)
        if rng.random() < 0.7:
            pair.shard.apply(ring)
            ring = []
        if rng.random() < 0.9 and pair.shard.budget:
            pair.now += 1.0
            for part in pair.scheduler.commit(pair.shard.step(), pair.now):
                assert part.sequence_id in alive
                if part.finish:
                    alive.remove(part.sequence_id)
        if number % 50 == 0:
            pair.scheduler.check()
    for victim in alive:
        pair.scheduler.abort(victim, pair.now)
    pair.shard.apply(ring)
    pair.step()
    scheduler = pair.scheduler
    assert scheduler.free_blocks + scheduler.cached_blocks == scheduler.total_blocks
    assert pair.shard.rows == {} and scheduler.batch_size == scheduler.queue_size == 0
    phases = ["waiting", "prefilling", "running"] + ["preempted"] * (not reserve)
    assert all(scheduler.counters[f"aborted_{phase}"] > 0 for phase in phases)
