"""The router's end of a connection: frames both ways, a slow shard, one that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from tgi_trio.errors import RingFull
from tgi_trio.ipc.tcp import FrameSocket
from tgi_trio.ipc.tcp_router_end import TcpRouterEnd

LARGE = 2**23
Pair = tuple[TcpRouterEnd, FrameSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    end = TcpRouterEnd(here.detach(), lambda: "rank 0")
    shard = FrameSocket(there, lambda: "router")
    yield end, shard
    end.close()
    shard.close()


@pytest.mark.trio
async def test_frames_cross_both_ways(pair: Pair) -> None:
    end, shard = pair
    assert end.try_send(b"command") and end.try_receive() is None
    assert shard.try_receive() == b"command"
    shard.release()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert shard.try_send(b"step 1") and shard.try_send(b"step 2")
    for wanted in (b"step 1", b"step 2"):
        with trio.fail_after(60):
            await end.wait()
        assert end.try_receive() == wanted
        end.release()


@pytest.mark.trio
async def test_what_a_slow_shard_has_not_taken_leaves_while_the_router_waits(pair: Pair) -> None:
    end, shard = pair
    large = bytes(LARGE)
    assert end.try_send(large), "it is taken, though it has not left"
    assert not end.try_send(b"next")
    with pytest.raises(RingFull, match="rank 0: has taken no frame of 4 bytes"):
        await end.send(b"next", 0.01)
    with trio.fail_after(60):
        while (view := shard.try_receive()) is None:
            with trio.move_on_after(0.01):  # all of it may have left by now
                await end.wait()
        assert len(view) == LARGE
        shard.release()
        await end.send(b"next", 60)
        while (view := shard.try_receive()) is None:
            await trio.sleep(0)
    assert view == b"next"


@pytest.mark.trio
async def test_a_shard_that_is_gone_is_silent_as_a_ring_would_be(pair: Pair) -> None:
    """Who watches it says so; an engine in the middle of a turn is told nothing."""
    end, shard = pair
    shard.close()
    assert end.try_receive() is None
    assert not end.try_send(b"command")
    with trio.move_on_after(0.05) as patience:
        await end.wait()
    assert patience.cancelled_caught
    with pytest.raises(RingFull):
        await end.send(b"command", 0.01)


@pytest.mark.trio
async def test_what_is_sent_while_the_router_waits_for_replies_leaves_whole(pair: Pair) -> None:
    """The wait had begun when nothing was unsent, so nobody looked for room."""
    end, shard = pair
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def serve() -> None:
            while True:
                await end.wait()

        await trio.testing.wait_all_tasks_blocked()
        assert end.try_send(bytes(LARGE))
        with trio.fail_after(60):
            while (view := shard.try_receive()) is None:
                await trio.sleep(0.001)
        assert len(view) == LARGE
        nursery.cancel_scope.cancel()
