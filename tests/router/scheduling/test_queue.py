"""Order and accounting of the queue; spec's queue cases where we agree with them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.router.scheduling.harness import limits, request
from tgi_trio.router.scheduling import Prefill, Scheduler
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.sequence import Sequence


def admitted(scheduler: Scheduler) -> list[int]:
    commands = scheduler.schedule(0.0)
    return [r.sequence for c in commands if isinstance(c, Prefill) for r in c.rows]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 3)), max_size=30), st.randoms())
def test_order_is_priority_then_started_then_arrival(wishes: list[tuple[int, int]], rng) -> None:
    queue = WaitingQueue()
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
