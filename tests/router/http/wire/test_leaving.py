"""Clients that leave: whatever they were at, their requests are aborted and nothing is left."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, STREAM, Client, read_until, served, until
from tgi_trio.router.http.wire.connection import ConnectionLimits
from tgi_trio.router.http.wire.server import ServerSettings

pytestmark = pytest.mark.trio


def close(stream: trio.SocketStream) -> None:
    stream.socket.close()


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    stream.socket.close()


def half_close(stream: trio.SocketStream) -> None:
    stream.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("busy", [False, True])
async def test_leaving_a_stream_aborts_it(http, leave, busy):
    engine = FakeEngine(lambda prompt: ENDLESS)
    async with served(engine, http, running=busy) as server:
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate_stream", STREAM, {}))
        await read_until(stream, b"\r\n\r\n")
        leave(stream)
        await until(lambda: not engine.live)
        await until(lambda: engine.permits == 0)
    assert len(engine.left) == 1


async def test_leaving_before_the_answer_aborts_it(http):
    engine = FakeEngine()
    async with served(engine, http, running=False) as server:
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate", STREAM, {}))
        await until(lambda: bool(engine.live))
        close(stream)
        await until(lambda: len(engine.left) == 1 and engine.permits == 0)


async def test_leaving_on_a_used_connection_aborts_it(http):
    engine = FakeEngine()
    async with served(engine, http, running=False) as server:
        client = await server.connect()
        assert (await client.get("/info")).status == 200
        await client.send("POST", "/generate_stream", {"inputs": "x"})
        await until(lambda: bool(engine.live))
        assert isinstance(client.stream, trio.SocketStream)
        close(client.stream)
        await until(lambda: len(engine.left) == 1 and engine.permits == 0)


async def test_ended_connections_leave_nothing_behind(http):
    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    async with served(FakeEngine(lambda prompt: ENDLESS), http) as server:
        await trio.testing.wait_all_tasks_blocked()
        before = tasks()
        for headers in ({}, {"connection": "close"}):
            client = await server.connect()
            assert (await client.get("/info", **headers)).status == 200
            await client.stream.aclose()
        silent = await server.raw()
        await silent.aclose()
        for leave in (close, reset, half_close):
            stream = await server.raw()
            await stream.send_all(Client.request("POST", "/generate_stream", STREAM, {}))
            await read_until(stream, b"data: ")
            leave(stream)
        await until(lambda: tasks() == before)


@pytest.mark.parametrize("leave", [close, half_close])
async def test_leaving_with_a_pipelined_request_behind_aborts_both(http, leave):
    engine = FakeEngine()
    async with served(engine, http, running=False) as server:
        stream = await server.raw()
        request = Client.request("POST", "/generate_stream", STREAM, {})
        await stream.send_all(request + request)
        await read_until(stream, b"\r\n\r\n")
        leave(stream)
        await until(lambda: len(engine.left) == 1 and engine.permits == 0)
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("end", [reset, b"\0\1\2 no HTTP\r\n\r\n"])
async def test_an_end_behind_a_full_read_ahead_leaves_nothing_behind(end):
    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    engine = FakeEngine(lambda prompt: ENDLESS)
    soon = ServerSettings(graceful_timeout=1.0, limits=ConnectionLimits(send_timeout=1.0))
    async with served(engine, settings=soon, running=False) as server:
        await trio.testing.wait_all_tasks_blocked()
        before = tasks()
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate_stream", STREAM, {}))
        await until(lambda: bool(engine.live))
        more = Client.request("POST", "/generate", b"x" * 10_000, {}) * 26  # just above the bound
        await stream.send_all(more + (end if isinstance(end, bytes) else b""))
        if not isinstance(end, bytes):
            await trio.testing.wait_all_tasks_blocked(0.01)
            end(stream)
        while engine.live:
            engine.step()
            await trio.sleep(0.001)
        await until(lambda: tasks() == before and not engine.permits)
    assert len(engine.submitted) == 1
