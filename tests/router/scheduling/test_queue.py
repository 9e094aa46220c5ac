"""Order and accounting of the queue; spec's queue cases where we agree with them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.scheduling.harness import limits, request
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Prefill, Scheduler
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.scheduling.ttft import TtftTarget


def admitted(scheduler: Scheduler, now: float = 0.0) -> list[int]:
    commands = scheduler.schedule(now)
    return [r.sequence for c in commands if isinstance(c, Prefill) for r in c.rows]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), max_size=30), st.randoms())
def test_order_is_priority_then_started_then_arrival(
    wishes: list[tuple[int, int]], rng: Random
) -> None:
    queue = WaitingQueue(limits(), TtftTarget(None))
    sequences = []
    for arrival, (priority, order) in enumerate(wishes):
        sequence = Sequence(arrival, request(3, priority=priority), arrival, 0.0, 0)
        sequence.order = order * 100 + arrival if order else 0
        sequences.append(sequence)
    rng.shuffle(sequences)
    for sequence in sequences:
        queue.add(sequence)
        queue.check()
    expected = sorted(
        sequences, key=lambda s: (s.priority, s.order == 0, s.order if s.order else s.arrival)
    )
    assert list(queue) == expected
    rng.shuffle(sequences)
    for sequence in sequences:
        queue.remove(sequence)
        queue.check()
    assert len(queue) == queue.tokens == 0


def test_an_empty_queue_yields_nothing() -> None:
    assert admitted(Scheduler(limits())) == []


def test_batch_size_limits_admission_and_holds_while_running() -> None:
    scheduler = Scheduler(limits(max_batch_size=1))
    scheduler.add(0, request(1, 1), 0.0)
    scheduler.add(1, request(1, 1), 0.0)
    assert admitted(scheduler) == [0]
    assert scheduler.queue_size == 1 and admitted(scheduler) == []


def test_prefill_budget_of_one_admits_one() -> None:
    scheduler = Scheduler(limits(max_batch_prefill_tokens=1))
    scheduler.add(0, request(1, 1), 0.0)
    scheduler.add(1, request(1, 1), 0.0)
    assert admitted(scheduler) == [0]


def test_drafts_count_as_kv_tokens() -> None:
    scheduler = Scheduler(limits(block_size=1, blocks=5, speculate=2))
    scheduler.add(0, request(1, 2), 0.0)  # 1 + 2 - 1 + 2 = 4 blocks, all there are
    scheduler.add(1, request(1, 1), 0.0)
    assert admitted(scheduler) == [0]
    assert scheduler.free_blocks == 0


def test_who_has_left_the_queue_is_not_admitted() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(0, request(1, 1), 0.0)
    scheduler.abort(0, 0.0)
    assert admitted(scheduler) == []


def test_max_batch_total_tokens_bounds_the_blocks() -> None:
    scheduler = Scheduler(limits(max_batch_total_tokens=40))
    assert scheduler.total_blocks == 10


def last_token(id: int) -> dict[str, Any]:
    """Return the columns of a step that ends a sequence of three tokens."""
    one = {"sequence": [id], "computed": [3], "token_count": [1], "prompt_count": [0]}
    rest = {"finish": [1], "token_ids": [5], "logprobs": [0.0], "top_count": [0]}
    return one | rest


def serve_one_after_the_other(scheduler: Scheduler, now: float) -> int:
    """Admit one (the batch holds no more), end it, and return who it was."""
    (id,) = admitted(scheduler, now)
    one: dict[str, Any] = {
        "sequence": [id],
        "computed": [3],
        "token_count": [1],
        "prompt_count": [0],
    }
    rest: dict[str, Any] = {"finish": [1], "token_ids": [5], "logprobs": [0.0], "top_count": [0]}
    scheduler.commit(StepReport(id + 1, 1 << 30, **one, **rest), now)
    scheduler.check()
    return id


def test_who_is_late_lets_those_go_first_that_can_be_in_time() -> None:
    scheduler = Scheduler(limits(max_batch_size=1, target_ttft=2.0))
    for id, arrival in enumerate([0.0, 0.1, 0.9, 1.0]):
        scheduler.add(id, request(3, 1), arrival)
    order = [serve_one_after_the_other(scheduler, 1.5) for _ in range(4)]
    assert order == [2, 3, 0, 1]


def test_without_a_target_who_is_late_is_learned_from_how_long_prompts_take() -> None:
    scheduler = Scheduler(limits(max_batch_size=1))
    scheduler.add(0, request(3, 1), 0.0)
    assert admitted(scheduler) == [0]
    one: dict[str, Any] = {
        "sequence": [0],
        "computed": [3],
        "token_count": [1],
        "prompt_count": [0],
    }
    rest: dict[str, Any] = {"finish": [1], "token_ids": [5], "logprobs": [0.0], "top_count": [0]}
    scheduler.commit(StepReport(1, 1 << 30, **one, **rest), 10.0)  # a prompt takes 10 s here
    for id, arrival in enumerate([10.0, 12.0, 24.0], start=1):
        scheduler.add(id, request(3, 1), arrival)
    assert serve_one_after_the_other(scheduler, 24.9) == 1  # 15 s are waited by nobody
    assert serve_one_after_the_other(scheduler, 100.0) == 2  # by all
    scheduler.add(4, request(3, 1), 100.0)
    assert serve_one_after_the_other(scheduler, 100.0) == 4


def test_however_fast_prompts_are_nobody_is_late_at_once() -> None:
    ttft_target = TtftTarget(None)
    ttft_target.note(0.001)
    assert ttft_target.longest_wait == 0.5
    assert TtftTarget(3.0).longest_wait == 1.5


@pytest.mark.parametrize("kind", ["late", "of low priority"])
def test_nobody_is_passed_more_often_than_patience_says(kind: str) -> None:
    late = kind == "late"
    scheduler = Scheduler(
        limits(max_batch_size=1, patience=5, target_ttft=2.0 if late else float("inf"))
    )
    scheduler.add(0, request(3, 1, priority=0 if late else 9), 0.0)
    order = []
    for id in range(1, 20):  # somebody more urgent is always there
        scheduler.add(id, request(3, 1), 5.0)
        order.append(serve_one_after_the_other(scheduler, 5.0))
    assert order.index(0) == 6
    assert sorted(order) == list(range(19))
