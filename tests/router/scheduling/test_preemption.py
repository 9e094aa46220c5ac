"""Blocks granted as sequences grow, and taken from the youngest when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.scheduling.harness import Pair, World, expected, limits, request
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.router.scheduling import Command, Extend, Filter, Prefill, preemption
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence


def growing(**changes: Any) -> Pair:
    return Pair(limits(**{"reserve": False, "ask_ahead": 2, "grant_ahead": 4, **changes}))


def until_preempted(pair: Pair) -> list[Command]:
    """Run until somebody is pushed out; returns the commands that say so, not yet applied."""
    for _ in range(100):
        commands = pair.scheduler.schedule(pair.now)
        if any(isinstance(command, Filter) for command in commands):
            return commands
        pair.shard.apply(commands)
        pair.commit(pair.shard.step())
    raise AssertionError("nobody is pushed out")


def test_a_sequence_is_granted_blocks_as_it_grows() -> None:
    pair = growing()
    pair.scheduler.add(1, request(5, 40), 0.0)
    rows = pair.send()[-1].rows
    assert len(rows[0].block_ids) == 3  # 5 tokens and 4 to come, not 44
    extends = stalled = 0
    while 1 not in pair.finished:
        extends += any(isinstance(command, Extend) for command in pair.send())
        report = pair.shard.step()
        stalled += report.stalled_rows
        pair.commit(report)
    assert extends >= 7 and stalled == 0
    assert pair.tokens[1] == expected(5, 40)
    assert pair.scheduler.counters["preempted"] == 0


def test_nothing_is_granted_beyond_the_need() -> None:
    pair = growing()
    pair.scheduler.add(1, request(5, 6), 0.0)
    assert len(pair.send()[-1].rows[0].block_ids) == 3
    while 1 not in pair.finished:
        pair.commit(pair.shard.step())
        assert pair.send() == []


def test_the_youngest_gives_way_and_comes_back() -> None:
    pair = growing(blocks=11)
    pair.scheduler.add(1, request(6, 30), 0.0)  # 9 of 10 blocks in the end
    pair.scheduler.add(2, request(7, 30), 0.0)
    pair.step()
    dropped: list[int] = []
    order: list[int] = []
    while len(pair.finished) < 2:
        for command in pair.send():
            if isinstance(command, Filter):
                dropped += command.sequences
            if isinstance(command, Prefill) and dropped:
                assert command.rows[0].prompt_length == 7
                assert len(command.rows[0].token_ids) == 7 + len(pair.tokens[2])
                assert command.rows[0].max_new_tokens == 30 - len(pair.tokens[2])
        pair.commit(pair.shard.step())
        order += [id for id in pair.finished if id not in order]
    assert dropped and set(dropped) == {2}
    assert order == [1, 2]
    assert pair.tokens == {1: expected(6, 30), 2: expected(7, 30)}
    assert pair.scheduler.counters["preempted"] == len(dropped)


def test_blocks_of_a_preempted_sequence_wait_for_the_acknowledgement() -> None:
    pair = growing(blocks=11)
    pair.scheduler.add(1, request(6, 30), 0.0)
    pair.scheduler.add(2, request(7, 30), 0.0)
    commands = until_preempted(pair)
    held = set(pair.shard.rows[2].blocks)
    for _ in range(3):  # the shard has not read the FILTER: its rows still count
        got = {p.sequence_id for p in pair.commit(pair.shard.step())}
        granted = pair.scheduler.schedule(pair.now)
        extends = [command for command in granted if isinstance(command, Extend)]
        assert len(extends) == len(granted)
        assert not held & {b for command in extends for r in command.rows for b in r.block_ids}
        commands += granted
        assert got <= {1, 2}
    pair.shard.apply(commands)
    pair.run()
    assert pair.tokens == {1: expected(6, 30), 2: expected(7, 30)}


def test_a_preempted_sequence_that_ends_meanwhile_has_ended() -> None:
    pair = growing(blocks=11)
    pair.scheduler.add(1, request(6, 30), 0.0)
    pair.scheduler.add(2, request(7, 30), 0.0)
    commands = until_preempted(pair)
    pair.shard.rows[2].remaining = 1  # as if its last token were due
    pair.commit(pair.shard.step())
    assert 2 in pair.finished
    pair.shard.apply(commands)
    pair.run()
    assert pair.tokens[1] == expected(6, 30)


def test_priorities_decide_who_gives_way() -> None:
    pair = growing(blocks=11)
    pair.scheduler.add(1, request(6, 30, priority=5), 0.0)
    pair.step()
    pair.scheduler.add(2, request(7, 30), 0.0)
    order: list[int] = []
    while len(pair.finished) < 2:
        pair.step()
        order += [id for id in pair.finished if id not in order]
    assert order == [2, 1]
    assert pair.tokens == {1: expected(6, 30), 2: expected(7, 30)}


@pytest.mark.parametrize("crash", [False, True])
def test_who_gave_way_to_more_urgent_ones_is_not_starved(crash: bool) -> None:
    """Two of them are always there, younger ones too; what was begun goes on and ends."""
    pair = growing(blocks=11, patience=5)
    pair.scheduler.add(0, request(6, 30, priority=5), 0.0)
    pair.step()
    urgent = 0
    while 0 not in pair.finished and urgent < 50:
        while urgent - len(pair.finished) < 2:
            urgent += 1
            pair.scheduler.add(urgent, request(7, 30), pair.now)
        pair.step()
        if crash and urgent == 4:
            crash = False
            pair.scheduler.shard_lost(pair.now)
            pair.shard = ModelShard(4)
    assert pair.scheduler.counters["preempted"] > 0
    assert 0 in pair.finished and len(pair.finished) <= 12
    assert pair.tokens[0] == expected(6, 30)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_cache_ten_times_too_small_serves_everyone(prefix_caching: bool) -> None:
    """40 requests of up to 40 tokens need about 400 blocks; there are 40, then 11."""
    for blocks in (41, 12):
        world = World(
            limits(
                reserve=False,
                prefix_caching=prefix_caching,
                blocks=blocks,
                ask_ahead=2,
                grant_ahead=4,
            )
        )
        for i in range(40):
            world.submit(request([i, *range(5 + i % 7)], 20 + i % 15))
        world.run()
        assert world.scheduler.counters["finished"] == 40


def test_a_crash_while_somebody_is_preempted() -> None:
    pair = growing(blocks=11)
    pair.scheduler.add(1, request(6, 30), 0.0)
    pair.scheduler.add(2, request(7, 30), 0.0)
    until_preempted(pair)
    pair.scheduler.shard_lost(pair.now)
    pair.scheduler.check()
    pair.shard = ModelShard(4)
    pair.run()
    assert pair.tokens == {1: expected(6, 30), 2: expected(7, 30)}


def test_a_draft_never_lacks_a_block_for_long() -> None:
    world = World(limits(reserve=False, speculate=3, ask_ahead=2, grant_ahead=4))
    for i in range(6):
        world.submit(request([i, 1, 2], 40))
    world.run()
    assert world.scheduler.counters["finished"] == 6


class Books:
    """A batch of sequences with given tables, computed to `computed`; nothing else is free."""

    def __init__(self, *computed: int, free: int = 0, max_new: int = 60) -> None:
        self.limits = limits(reserve=False, ask_ahead=2, grant_ahead=8)
        granted = [computed + 1 for computed in computed]
        total = sum(-(-tokens // 4) for tokens in granted) + free
        self.memory = KvMemory(total, 4, caching=False)
        self.batch = RunningBatch(self.limits, self.memory)
        for order, (done, tokens) in enumerate(zip(computed, granted, strict=True), start=1):
            sequence = Sequence(order, request(2, max_new), order, 0.0, 0)
            self.memory.admit(sequence, None, tokens)
            sequence.order, sequence.computed = order, done
            self.batch.enter(sequence)

    def extended(self) -> list[int]:
        return [
            row.sequence for row in preemption.extend_blocks(self.batch, self.memory, self.limits)
        ]

    def victims(self, *dropped: int) -> list[int]:
        members = [self.batch.members[id] for id in dropped]
        for sequence in members:
            self.batch.leave(sequence)
        return [s.id for s in preemption.victims(self.batch, self.memory, self.limits, members)]


def test_the_oldest_is_served_first() -> None:
    books = Books(7, 7, 7, free=1)
    assert set(books.batch.starving) == {1, 2, 3}
    assert books.extended() == [1]


def test_nobody_gives_way_to_someone_younger() -> None:
    assert Books(1, 7).victims() == []  # 2 starves and is the youngest: it sits out
    assert Books(7, 1).victims() == [2]
    assert Books(7, 7).victims() == [2]
    assert Books(1, 7, 1).victims() == [3]


def test_no_more_is_taken_than_is_short() -> None:
    assert Books(7, 7, 7, 7).victims() == [4]  # its two blocks serve 1 and 2; 3 sits out
    assert Books(7, 7, 7, 7, 7).victims() == [5, 4]
    assert Books(7, 1, 1, 1).victims() == [4]


def test_blocks_on_their_way_back_count() -> None:
    assert Books(7, 7, 7, 7).victims(4) == []
