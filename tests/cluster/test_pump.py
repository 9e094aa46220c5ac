"""Sockets are read without a turn of trio's loop, which gets its turns all the same."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest
import trio
import trio.testing

from tests.cluster.fake_replica import BODY, WHOLE, fake_replicas
from tests.cluster.served_front import served_front
from tgi_trio.cluster import replica_http
from tgi_trio.cluster.pump import Pump, current_pump

pytestmark = pytest.mark.trio

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def pump() -> Pump:
    found = current_pump()
    assert found is not None and found is current_pump()
    return found


class Turns(trio.abc.Instrument):
    """Counts turns of the loop."""

    def __init__(self) -> None:
        self.seen = 0

    def after_io_wait(self, timeout: float) -> None:
        self.seen += 1


async def test_what_comes_takes_no_turn_of_the_loop(pair: Pair) -> None:
    ours, theirs = pair
    seen: list[int] = []
    turns = Turns()

    def take() -> bool:
        data = ours.recv(100)
        seen.append(turns.seen)
        ours.send(data)
        return data != b"end"

    def talk() -> None:
        for piece in [*[b"%d" % n for n in range(50)], b"end"]:
            theirs.send(piece)
            assert theirs.recv(100) == piece

    trio.lowlevel.add_instrument(turns)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, talk)
        await pump().drain(ours, take)
    assert len(seen) == 51
    assert seen[-2] - seen[1] <= 3  # a turn for each piece would be 48


async def test_a_task_that_is_woken_gets_its_turn(pair: Pair) -> None:
    ours, theirs = pair
    woken = trio.Event()

    def take() -> bool:
        ours.recv(100)
        woken.set()
        return True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump().drain, ours, take)
        nursery.start_soon(trio.to_thread.run_sync, partial(theirs.send, b"x"))
        with trio.fail_after(60):
            await woken.wait()
        nursery.cancel_scope.cancel()


async def test_trio_is_not_starved_by_a_stream_without_end(pair: Pair) -> None:
    """Its deadlines, its sockets and what threads hand in have their turns."""
    ours, theirs = pair
    theirs.send(b"x")
    looks = 0

    def look() -> bool:  # there is always something to be read
        nonlocal looks
        looks += 1
        return ours.recv(1, socket.MSG_PEEK) == b"x"

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    connect = partial(trio.testing.open_stream_to_socket_listener, listener)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump().drain, ours, look)
        with trio.fail_after(60):
            with trio.move_on_after(0.02) as patience:
                await trio.sleep_forever()
            assert patience.cancelled_caught
            async with await connect() as client, await listener.accept() as server:
                await client.send_all(b"y")
                assert await server.receive_some(1) == b"y"
            await trio.to_thread.run_sync(partial(trio.from_thread.run_sync, lambda: None))
        assert looks > 10
        nursery.cancel_scope.cancel()
    await listener.aclose()


async def test_what_a_drain_raises_is_raised_where_it_is_waited_for(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send(b"x")

    def fail() -> bool:
        raise ValueError("cannot be read")

    with pytest.raises(ValueError, match="cannot be read"):
        await pump().drain(ours, fail)
    with trio.move_on_after(0.01):  # the socket may be drained again
        await pump().drain(ours, lambda: True)
    await pump().drain(ours, lambda: False)


async def test_a_socket_that_is_closed_here_ends_its_drain(pair: Pair) -> None:
    ours, _ = pair

    async def drain() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pump().drain(ours, lambda: True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        pump().notify_closing(ours)
        ours.close()
    pump().notify_closing(ours)
    with pytest.raises(trio.ClosedResourceError):
        await pump().drain(ours, lambda: True)


async def test_streams_pass_where_trio_is_not_built_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_http, "current_pump", lambda: None)
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE
