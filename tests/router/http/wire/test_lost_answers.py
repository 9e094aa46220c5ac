"""Answers that a client would lose to a reset: what it has sent is unread where we close.

The kernel then sends a reset instead of an end, and forgets what the client has not received yet.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.router.http.served import Server, served, until
from tgi_trio.accepting import Acceptor
from tgi_trio.router.http.wire.connection import ConnectionLimits
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.server import ServerSettings

pytestmark = pytest.mark.trio


class BusyLoop(LoopPace):
    """The pace of a loop that has no young turns until it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.has_time = trio.Event()

    async def breathe(self) -> None:
        await self.has_time.wait()


def drain(server: Server, acceptor: Acceptor) -> None:
    server.shutdown.set()


def want_room(server: Server, acceptor: Acceptor) -> None:
    assert acceptor.make_room()


def wait_long(server: Server, acceptor: Acceptor) -> None:
    """It is past the deadline of a first request."""


@pytest.mark.parametrize("why", [drain, want_room, wait_long])
async def test_a_request_that_has_arrived_is_answered_though_its_connection_was_to_be_closed(
    why: Callable[[Server, Acceptor], None], mock_clock: trio.testing.MockClock
) -> None:
    pace, acceptor = BusyLoop(), Acceptor()
    settings = ServerSettings(limits=ConnectionLimits(head_timeout=2.0))
    async with served(settings=settings, pace=pace, acceptor=acceptor) as server:
        client = await server.connect()
        await client.send("GET", "/info")
        await trio.testing.wait_all_tasks_blocked(0.02)
        mock_clock.jump(1.5 if why is not wait_long else 2.5)
        why(server, acceptor)
        await trio.testing.wait_all_tasks_blocked(0.02)
        pace.has_time.set()
        assert (await client.answer()).status == 200
