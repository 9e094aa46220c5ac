"""Copies between device and host: who waits for them, and that nobody else does."""

from __future__ import annotations

import random
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from tests.shard.loop.scripted_router import BLOCK, ScriptedRouter, answer, channel, fake_shard, row
from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import ExtendRow, PrefillRow, StateGrant
from tgi_trio.ipc.prefixes import KeepOrder, encode_keep
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.ipc.transfers import Transfer, encode_transfers
from tgi_trio.shard.loop import transfers as transfers_module
from tgi_trio.shard.loop.transfers import Transfers
from tgi_trio.shard.prefixes.host_copies import split_transfers
from tgi_trio.testing.fake_model import FakeRunner
from tgi_trio.testing.fake_shard import FakeShard
from tgi_trio.testing.late_copies import LateCopies

PROMPT = [*range(20, 20 + 4 * BLOCK), 7]


class Slow:
    """Copies that are over when a test says so."""

    def __init__(self) -> None:
        self.done = 0
        self.launched: list[list[Transfer]] = []

    def launch(self, transfers: object) -> None:
        assert isinstance(transfers, list)
        self.launched.append(transfers)

    def finish(self) -> None:
        self.done = len(self.launched)


def out(block: int, place: int = 1) -> Transfer:
    return Transfer(block, place, back=False)


def back(block: int, place: int = 1) -> Transfer:
    return Transfer(block, place, back=True)


def of(sequence: int, *blocks: int, states: StateGrant | None = None) -> PrefillRow:
    return PrefillRow(sequence, np.arange(3, dtype=np.int32), 3, 0, blocks, 1, states=states)


# --- who waits -----------------------------------------------------------------------------------


def test_a_sequence_waits_for_copies_of_its_own_blocks_alone() -> None:
    slow = Slow()
    here = Transfers(slow)
    assert not here.delays(of(1, 5, 6)) and not here.is_busy
    here.order([out(5)])
    here.order([back(7)])
    assert here.is_busy
    assert here.delays(of(2, 4, 5)) and here.delays(of(3, 7)) and not here.delays(of(4, 6))
    for _ in range(3):
        here.advance()
    assert len(slow.launched) == 2
    assert 2 in here and 3 in here and 4 not in here
    slow.done = 1
    here.advance()
    assert 2 not in here and 3 in here and here.done == 1
    slow.done = 2
    here.advance()
    assert 3 not in here and not here.is_busy
    assert not here.delays(of(5, 5, 7))


def test_slots_of_states_are_waited_for_as_blocks_are() -> None:
    here = Transfers(Slow())
    here.order([Transfer(3, 1, back=True, states=True)])
    assert not here.delays(of(1, 3))
    for grant in (StateGrant((3, 4)), StateGrant((8, 9), 3), StateGrant((8, 9), saves=((16, 3),))):
        assert here.delays(of(2, 1, states=grant))
    assert not here.delays(of(3, 1, states=StateGrant((8, 9), 7)))


def test_blocks_are_added_in_the_order_in_which_they_are_granted() -> None:
    slow = Slow()
    here = Transfers(slow)
    here.order([out(5)])
    first, second, other = ExtendRow(1, [5]), ExtendRow(1, [6]), ExtendRow(2, [7])
    assert here.delays_extension(first)
    assert here.delays_extension(second), "it is behind another of its sequence"
    assert not here.delays_extension(other)
    here.advance()
    assert list(here.take_due()) == []
    slow.done = 1
    here.advance()
    assert list(here.take_due()) == [first, second]
    assert not here.delays_extension(ExtendRow(1, [5]))


def test_blocks_are_still_to_be_added_when_all_copies_have_been_waited_for() -> None:
    """As a KEEP waits for them: the loop asks for what is due while there is anything to do."""
    slow = Slow()
    here = Transfers(slow)
    here.order([out(5)])
    assert here.delays_extension(ExtendRow(1, [5]))
    here.finish()
    assert here.is_busy
    assert list(here.take_due()) == [ExtendRow(1, [5])] and not here.is_busy


def test_a_dropped_sequence_gets_no_more_blocks() -> None:
    slow = Slow()
    here = Transfers(slow)
    here.order([out(5), out(6, 2)])
    assert here.delays(of(1, 5)) and here.delays_extension(ExtendRow(1, [6]))
    here.drop(1)
    assert 1 not in here
    slow.done = 1
    here.advance()
    assert list(here.take_due()) == []


def test_few_copies_are_launched_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "_AT_ONCE", 3)
    slow = Slow()
    here = Transfers(slow)
    ordered = [out(block, block) for block in range(1, 9)]
    here.order(ordered)
    for launches in (1, 2, 3, 3):
        here.advance()
        assert len(slow.launched) == launches
    here.order([out(9)])
    here.advance()
    assert len(slow.launched) == 3, "a fourth has to wait for the first"
    assert [each for part in slow.launched for each in part] == ordered
    assert here.delays(of(1, 2)) and here.delays(of(2, 8))
    slow.done = 1
    here.advance()
    assert 1 not in here and 2 in here


def test_orders_that_pile_up_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "_MOST", 3)
    slow = Slow()
    here = Transfers(slow)
    for block in range(1, 5):
        here.order([out(block)])
    assert here.done == 0
    here.order([out(5)])
    assert here.done == 4 and here.delays(of(1, 5)) and not here.delays(of(2, 4))


def test_the_end_waits_for_all_of_them() -> None:
    slow = Slow()
    here = Transfers(slow)
    for block in range(1, 4):
        here.order([out(block)])
    here.finish()
    assert here.done == len(slow.launched) == 3 and not here.is_busy


# --- batches -------------------------------------------------------------------------------------


def test_batches_copy_as_one_after_the_other_does() -> None:
    rng = random.Random(1)
    for _ in range(200):
        most = rng.randint(1, 6)
        ordered = [
            Transfer(rng.randint(1, 5), rng.randint(1, 4), rng.random() < 0.5, rng.random() < 0.2)
            for _ in range(rng.randint(0, 30))
        ]
        cut = list(split_transfers(ordered, most))
        assert all(0 < len(batch.items) <= most for batch in cut)
        assert all(len(set(b.items)) == len(b.items) == len(set(b.places)) for b in cut)
        again = [
            Transfer(item, place, batch.back, batch.states)
            for batch in cut
            for item, place in zip(batch.items, batch.places, strict=True)
        ]
        assert again == ordered


# --- in the loop ---------------------------------------------------------------------------------


def copy(router: ScriptedRouter, *transfers: Transfer) -> int:
    router.command += 1
    router.end.send(encode_transfers(router.command, transfers))
    return router.command


def test_a_prefix_that_was_copied_out_and_back_is_there() -> None:
    with fake_shard(host_blocks=8) as (router, _):
        router.limits(100)
        router.prefill(row(1, PROMPT, 3, blocks=range(1, 6)))
        router.finished(1)
        copy(router, *(out(block, block) for block in range(1, 5)))
        router.prefill(row(2, [9, *PROMPT], 3, blocks=range(1, 6)))  # over the same blocks
        router.finished(2)
        copy(router, *(back(block + 10, block) for block in range(1, 5)))
        router.prefill(row(3, PROMPT, 3, blocks=range(11, 16), cached=4 * BLOCK))
        router.finished(3)
        assert router.fault(2) is None and router.fault(3) is None
        assert router.tokens(3) == router.tokens(1) == answer(PROMPT, 3)


def test_others_go_on_while_one_waits() -> None:
    """The steps of a copy's time are those of the sequences that do not wait for it."""
    with fake_shard(host_blocks=8, step_ms=1.0) as (router, _):
        router.limits(100)
        router.prefill(row(1, [5, 6, 7], 50, blocks=range(40, 60)))
        router.prefill(row(2, PROMPT, 1, blocks=range(1, 6)))
        router.finished(2)
        copy(router, *(out(block, block) for block in range(1, 5)))
        copy(router, *(back(block, block) for block in range(1, 5)))
        router.prefill(row(3, PROMPT, 3, blocks=range(1, 6), cached=4 * BLOCK))
        router.finished(1, 3)
        assert router.tokens(1) == answer([5, 6, 7], 50)
        assert router.tokens(3) == answer(PROMPT, 3)
        began = min(each.step for each in router.rows(3))
        waited = [each for each in router.rows(1) if each.step < began]
        assert began - min(each.step for each in router.rows(2)) >= 3 and len(waited) >= 3


@pytest.mark.parametrize("keeps", [False, True])
def test_a_sequence_gets_blocks_that_are_still_copied_out_later(
    tmp_path: Path, keeps: bool
) -> None:
    """Also where prefixes are kept meanwhile, for which all copies are waited for."""
    with fake_shard(host_blocks=8) as (router, _):
        router.limits(100)
        router.prefill(row(1, PROMPT, 1, blocks=range(1, 6)))
        router.finished(1)
        router.prefill(row(2, [5, 6, 7], 12, blocks=[20]))
        copy(router, *(out(block, block) for block in range(1, 5)))
        router.extend(2, 1, 2)
        router.extend(2, 30)
        if keeps:
            router.end.send(encode_keep(0, KeepOrder(tmp_path, bytes(16), (20,))))
        router.finished(2)
        assert router.tokens(2) == answer([5, 6, 7], 12) and len(router.kept) == keeps
        copy(router, *(back(block, block) for block in range(1, 5)))
        router.prefill(row(3, PROMPT, 2, blocks=[1, 2, 3, 4, 6], cached=4 * BLOCK))
        router.finished(3)
        assert router.tokens(3) == answer(PROMPT, 2)


def test_one_that_leaves_while_it_waits_is_dropped_and_its_blocks_stay_cached() -> None:
    with fake_shard(host_blocks=8) as (router, shard):
        router.limits(100)
        router.prefill(row(1, PROMPT, 1, blocks=range(1, 6)))
        router.finished(1)
        copy(router, *(out(block, block) for block in range(1, 5)))
        copy(router, *(back(block + 10, block) for block in range(1, 5)))
        router.prefill(row(2, PROMPT, 3, blocks=range(11, 16), cached=4 * BLOCK))
        router.acknowledged(router.filter(2))
        router.prefill(row(3, PROMPT, 3, blocks=[11, 12, 13, 14, 30], cached=4 * BLOCK))
        router.finished(3)
        assert router.tokens(3) == answer(PROMPT, 3) and not router.tokens(2)
        assert shard.runner is not None and shard.runner.dropped == [1, 2, 3]


def test_states_come_back_with_their_blocks() -> None:
    with fake_shard(host_blocks=8, host_slots=2, state_slots=9) as (router, _):
        router.limits(100)
        grant = StateGrant((1, 2), saves=((4 * BLOCK, 3),))
        router.prefill(row(1, PROMPT, 3, blocks=range(1, 6), states=grant))
        router.finished(1)
        copies = [out(block, block) for block in range(1, 5)]
        copy(router, *copies, Transfer(3, 2, back=False, states=True))
        over = StateGrant((3, 4))
        router.prefill(row(2, [9, *PROMPT], 3, blocks=range(1, 6), states=over))
        router.finished(2)
        copies = [back(block + 10, block) for block in range(1, 5)]
        copy(router, *copies, Transfer(7, 2, back=True, states=True))
        again = StateGrant((5, 6), source=7)
        router.prefill(row(3, PROMPT, 3, blocks=range(11, 16), cached=4 * BLOCK, states=again))
        router.finished(3)
        assert router.fault(2) is None and router.fault(3) is None
        assert router.tokens(3) == answer(PROMPT, 3)


def test_a_second_warm_up_finds_nothing_that_keeps_the_first_cache_alive() -> None:
    """Both may not fit into a device's memory."""
    with fake_shard(host_blocks=8) as (router, shard):
        runner = shard.runner
        assert runner is not None and isinstance(runner.host_copies, LateCopies)
        first, found = weakref.ref(runner.host_copies), list[object]()

        def warm_up(request: WarmupRequest) -> WarmupResult:
            assert runner is not None
            runner._copies = None
            found.append(first())
            return FakeRunner.warm_up(runner, request)

        runner.warm_up = warm_up  # type: ignore[method-assign]
        router.warm_up()
        while (kind := router.receive().kind) is not FrameKind.WARMUP_REPLY:
            assert kind is FrameKind.STEP  # which acknowledges what came before
            router.end.release()
        router.end.release()
        assert found == [None] and runner.host_copies is not None
        copy(router, out(1))
        router.acknowledged(router.limits(7))


def test_a_shard_without_such_memory_refuses_orders() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec) as shard:
        router.greet()
        router.warm_up()
        router.receive()
        router.end.release()
        copy(router, out(1))
        shard.wait()
    assert isinstance(shard.error, ProtocolMismatch)
    assert "keeps no copies in the host's memory" in str(shard.error)


def test_late_copies_are_late() -> None:
    """The fake that holds the others: what reads or overwrites a block too early finds out."""
    blocks = np.arange(12).reshape(4, 3)
    late = LateCopies(blocks, np.zeros((0, 1), np.int64), (2, 0))
    ordered = deque([[out(1, 1)], [back(2, 1)]])
    late.launch(ordered[0])
    blocks[1] = 77  # too early
    late.launch(ordered[1])
    assert blocks[2].tolist() == [6, 7, 8], "its turn has not come"
    while not late.done:
        continue
    assert (blocks[2] < 0).all()
    late.finish()
    assert blocks[2].tolist() == [77] * 3 and late.done == 2
