"""Sockets that can be read at one time wake few tasks in a turn, and none is forgotten."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, STREAM, Client, read_until, served, until
from tests.support.turns import counted_turns
from tgi_trio.router.http.wire import server as servers
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.readiness import _WOKEN, Readiness

pytestmark = pytest.mark.trio

Pairs = list[tuple[socket.socket, socket.socket]]


@asynccontextmanager
async def watched(count: int, by_trio: int = 0) -> AsyncIterator[tuple[Readiness, Pairs]]:
    """Yield a watch, and pairs of connected sockets."""
    readiness = Readiness(LoopPace(), by_trio)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        for pair in pairs:
            for each in pair:
                each.setblocking(False)
                stack.enter_context(each)
        async with readiness.watching():
            yield readiness, pairs


@pytest.mark.parametrize("by_trio", [0, 5])
async def test_few_are_woken_in_a_turn(by_trio: int) -> None:
    woken, count = Counter[int](), 200
    async with watched(count, by_trio) as (readiness, pairs):
        with counted_turns() as turns:

            async def wait(sock: socket.socket) -> None:
                await readiness.wait(sock)
                woken[turns.count] += 1

            async with trio.open_nursery() as nursery:
                for ours, _ in pairs:
                    nursery.start_soon(wait, ours)
                await trio.testing.wait_all_tasks_blocked()
                for n, (_, theirs) in enumerate(pairs):
                    if n % 2:
                        theirs.close()
                    else:
                        theirs.send(b"x")
    assert sum(woken.values()) == count
    assert max(woken.values()) <= _WOKEN + by_trio


@pytest.mark.parametrize("seed", range(3))
async def test_everything_that_is_sent_is_read_whoever_gives_up_waiting(seed: int) -> None:
    draw, count, each = random.Random(seed), 40, 30
    read = Counter[int]()
    async with watched(count, by_trio=3) as (readiness, pairs):

        async def reader(n: int, sock: socket.socket) -> None:
            while read[n] < each:
                with trio.move_on_after(draw.choice((0, 1e-4, 1e-2, 5.0))):
                    await readiness.wait(sock)
                    read[n] += len(sock.recv(draw.randrange(1, 4)))

        async def writer() -> None:
            unsent = [theirs for _, theirs in pairs for _ in range(each)]
            draw.shuffle(unsent)
            for n, theirs in enumerate(unsent):
                theirs.send(b"x")
                if n % 50 == 0:
                    await trio.sleep(1e-3)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for n, (ours, _) in enumerate(pairs):
                    nursery.start_soon(reader, n, ours)
                nursery.start_soon(writer)
    assert list(read.values()) == [each] * count
    assert not readiness._waiting and readiness._by_trio == 3


async def test_who_waits_for_a_socket_that_is_closed_is_told() -> None:
    async with watched(2) as (readiness, pairs):
        (ours, _), (other, theirs) = pairs

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await readiness.wait(ours)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await readiness.wait(ours)
            readiness.forget(other)  # nobody waits for it
            readiness.forget(ours)
            descriptor = ours.fileno()
            ours.close()
        readiness.forget(ours)
        with pytest.raises(trio.ClosedResourceError):
            await readiness.wait(ours)
        with other.dup() as again:  # has the descriptor of the closed one
            assert again.fileno() == descriptor
            theirs.send(b"x")
            with trio.fail_after(5):
                await readiness.wait(again)
            assert again.recv(1) == b"x"


async def test_others_are_woken_though_turns_are_long() -> None:
    pace = LoopPace(lambda: next(times))
    times = (float(n) for n in range(1 << 30))  # each look finds an old turn
    readiness = Readiness(pace, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs, pace.watching():
        theirs.send(b"x")
        async with readiness.watching():
            with trio.fail_after(5):
                await readiness.wait(ours)


class Busiest(trio.abc.Instrument):
    """Counts how many tasks were woken in the turn in which most were."""

    def __init__(self) -> None:
        self.most = self._now = 0

    def after_io_wait(self, timeout: float) -> None:
        self._now = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._now += 1
        self.most = max(self.most, self._now)


async def test_clients_that_leave_together_do_not_wake_all_their_tasks_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "Readiness", partial(Readiness, by_trio=4))
    engine, count = FakeEngine(lambda prompt: ENDLESS), 120
    busiest, pace = Busiest(), LoopPace()
    async with served(engine, running=False, pace=pace) as server:
        server.app.pace = pace
        streams = [await server.raw() for _ in range(count)]
        for stream in streams:
            await stream.send_all(Client.request("POST", "/generate_stream", STREAM, {}))
        for stream in streams:
            await read_until(stream, b"\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(busiest)
        for stream in streams:
            stream.socket.close()
        await until(lambda: not engine.live)
        trio.lowlevel.remove_instrument(busiest)
    assert len(engine.left) == count
    assert busiest.most < count - 20
