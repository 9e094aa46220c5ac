"""Answers that a client would lose to a reset: what it has sent is unread where we close.

The kernel then sends a reset instead of an end, and forgets what the client has not received yet.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.router.http.served import Client, Server, read_all, served
from tests.router.http.wire.http2_client import CERTIFICATE, tls
from tgi_trio.process.accepting import Acceptor
from tgi_trio.router.http.call import HttpSettings
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


@pytest.mark.parametrize("certificate", [None, CERTIFICATE], ids=["plain", "tls"])
@pytest.mark.parametrize("why", [drain, want_room, wait_long])
async def test_a_request_that_has_arrived_is_answered_though_its_connection_was_to_be_closed(
    why: Callable[[Server, Acceptor], None],
    certificate: str | None,
    mock_clock: trio.testing.MockClock,
) -> None:
    pace, acceptor = BusyLoop(), Acceptor()
    settings = ServerSettings(certfile=certificate, limits=ConnectionLimits(head_timeout=2.0))
    async with served(settings=settings, pace=pace, acceptor=acceptor) as server:
        client = await server.connect()
        if certificate is not None:
            client = Client(trio.SSLStream(client.stream, tls("http/1.1"), https_compatible=True))
        await client.send("GET", "/info")
        await trio.testing.wait_all_tasks_blocked(0.02)
        mock_clock.jump(1.5 if why is not wait_long else 2.5)
        why(server, acceptor)
        await trio.testing.wait_all_tasks_blocked(0.02)
        pace.has_time.set()
        assert (await client.answer()).status == 200


async def connect_slowly(server: Server) -> trio.SocketStream:
    """Return a connection whose client has room for little of an answer."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(("127.0.0.1", server.port))
    server.opened.append(trio.SocketStream(sock))
    return server.opened[-1]


LARGE = b"GET /api-doc/openapi.json HTTP/1.1\r\nhost: test\r\n"
BEGUN = b"POST /generate HTTP/1.1\r\nhost:"


@pytest.mark.parametrize(
    ("request_head", "more"),
    [
        (LARGE + b"connection: close\r\n\r\n", b"\r\n"),  # as old clients send behind a body
        (LARGE + b"connection: close\r\n\r\n", BEGUN),
        (LARGE.replace(b"1.1", b"1.0") + b"\r\n", b"\r\n"),
    ],
)
async def test_what_comes_behind_a_last_request_costs_nobody_the_answer(
    request_head: bytes, more: bytes
) -> None:
    pace = BusyLoop()
    pace.has_time.set()
    async with served(pace=pace) as server:
        expected = (await (await server.connect()).get("/api-doc/openapi.json")).body
        stream = await connect_slowly(server)
        await stream.send_all(request_head)
        data = bytearray(await stream.receive_some(1))  # it is being answered
        pace.has_time = trio.Event()
        await stream.send_all(more)
        server.nursery.start_soon(have_time_later, pace)
        while piece := await stream.receive_some(4096):
            data += piece
        assert data.endswith(expected[-1000:])


async def have_time_later(pace: BusyLoop) -> None:
    await trio.sleep(0.2)
    pace.has_time.set()


async def test_an_answer_is_not_lost_to_requests_that_are_read_no_further() -> None:
    """They wait behind one that is answered while the server drains."""
    async with served(running=False) as server:
        expected = (await (await server.connect()).get("/api-doc/openapi.json")).body
        stream = await connect_slowly(server)
        async with trio.open_nursery() as nursery:
            await stream.send_all(LARGE + b"\r\n")
            data = bytearray(await stream.receive_some(1))
            padded = LARGE + b"padding: %b\r\n\r\n" % (b"x" * 8000)
            nursery.start_soon(send_until_refused, stream, padded * 200)
            await trio.testing.wait_all_tasks_blocked(0.05)
            server.shutdown.set()
            with suppress(trio.BrokenResourceError):
                while piece := await stream.receive_some(1 << 16):
                    data += piece
            nursery.cancel_scope.cancel()
    assert data.endswith(expected[-1000:])


async def send_until_refused(stream: trio.SocketStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)


async def announce_a_large_body(server: Server) -> trio.SocketStream:
    stream = await server.raw()
    head = Client.request("POST", "/generate", b"", {}).replace(b"length: 0", b"length: 800000")
    await stream.send_all(head)
    return stream


async def test_a_client_may_take_its_time_to_send_what_is_refused(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Many read nothing before they have sent all."""
    async with served(http=HttpSettings(payload_limit=1000)) as server:
        stream = await announce_a_large_body(server)
        for _ in range(8):
            await stream.send_all(b" " * 100_000)
            await trio.testing.wait_all_tasks_blocked(0.02)
            mock_clock.jump(1.5)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_never_ends_what_is_refused_is_left(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with served(http=HttpSettings(payload_limit=1000)) as server:
        stream = await announce_a_large_body(server)
        with pytest.raises(trio.BrokenResourceError):
            for _ in range(100):
                await stream.send_all(b" ")
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(1.5)


async def test_clients_that_have_connected_before_the_end_are_served() -> None:
    """They wait in the kernel's queue, and would be reset with it."""
    async with served() as server:
        clients = [Client(to_trio(sock)) for sock in connect_at_once(server.port, 20)]
        for client in clients:
            await client.send("GET", "/info")
        server.shutdown.set()
        for client in clients:
            async with client.stream:
                assert (await client.answer()).status == 200
        await server.done.wait()
        with pytest.raises(OSError):
            await server.raw()


def connect_at_once(port: int, count: int) -> list[socket.socket]:
    """Return connections that were made without a turn of the loop."""
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


def to_trio(sock: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))
