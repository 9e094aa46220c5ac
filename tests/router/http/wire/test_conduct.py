"""Connections: how they are kept and how they end, readers that do not read, shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import (
    Client,
    read_all,
    served,
    unchunked,
    until,
    without_receipts,
)
from tgi_trio.errors import ConfigurationError
from tgi_trio.process.accepting import Acceptor
from tgi_trio.process.sockets import bind_sockets
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.wire.connection import ConnectionLimits
from tgi_trio.router.http.wire.server import ServerSettings, listen

pytestmark = pytest.mark.trio

# ---- keeping and ending connections ------------------------------------------------------------


async def test_a_connection_serves_many_requests(http):
    async with served(http=http) as server:
        client = await server.connect()
        for _ in range(5):
            assert (await client.post("/generate", {"inputs": "x"})).status == 200
            answer = await client.post("/generate_stream", {"inputs": "x"})
            assert len(answer.events()) == 12


async def test_connection_close_is_honoured(http):
    async with served(http=http) as server:
        for path in ("/generate", "/generate_stream"):
            stream = await server.raw()
            await stream.send_all(
                Client.request("POST", path, b'{"inputs":"x"}', {"connection": "close"})
            )
            data = await read_all(stream)  # ends, that is the point
            assert data.startswith(b"HTTP/1.1 200 ")
            assert b"Hello world" in data


async def test_http_1_0_clients_get_their_end(http):
    async with served(http=http) as server:
        for path in ("/generate", "/generate_stream"):
            stream = await server.raw()
            body = b'{"inputs":"x"}'
            await stream.send_all(
                b"POST %b HTTP/1.0\r\ncontent-type: application/json\r\n" % path.encode()
                + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            data = await read_all(stream)
            assert b"Hello world" in data
            assert b"transfer-encoding" not in data.lower()


async def test_idle_connections_are_closed(patient_clock):
    limits = ConnectionLimits(head_timeout=0.5)
    settings = ServerSettings(keep_alive_timeout=0.5, limits=limits)
    async with served(settings=settings) as server:
        silent = await server.raw()
        half = await server.raw()
        await half.send_all(b"GET /info HTTP/1.1\r\nhost:")
        used = await server.connect()
        assert (await used.get("/info")).status == 200
        for stream in (silent, half, used.stream):
            assert await stream.receive_some(10) == b""


async def test_a_connection_waits_longer_for_another_request_than_for_a_head(patient_clock):
    # Proxies keep connections for minutes; nobody takes so long to send a head.
    settings = ServerSettings(keep_alive_timeout=1000.0, limits=ConnectionLimits(head_timeout=0.3))
    async with served(settings=settings, running=False) as server:
        kept, slow, ahead = [await server.connect() for _ in range(3)]
        assert (await kept.get("/info")).status == 200
        assert (await slow.get("/info")).status == 200
        await slow.stream.send_all(b"GET /info HTTP/1.1\r\nhost:")
        # Its second head begins while the first is being answered.
        await ahead.send("POST", "/generate", {"inputs": "x"})
        await ahead.stream.send_all(b"GET /info")
        assert await slow.stream.receive_some(10) == b""
        await until(lambda: bool(server.engine.live))
        while server.engine.live:
            server.engine.step()
        assert b"Hello world" in await read_all(ahead.stream)
        assert (await kept.get("/info")).status == 200


async def until_still(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself while the clock stands still."""
    while not condition():
        await trio.testing.wait_all_tasks_blocked(0.01)


async def test_the_longest_idle_connection_makes_room_for_another_client(mock_clock, caplog):
    acceptor = Acceptor(4)
    async with served(running=False, acceptor=acceptor) as server:
        asked, used, oldest, silent = [await server.connect() for _ in range(4)]
        for client in (used, oldest):
            assert (await client.get("/info")).status == 200
        await asked.send("POST", "/generate", {"inputs": "x"})
        await until_still(lambda: bool(server.engine.live))
        assert (await used.get("/info")).status == 200
        mock_clock.jump(2)
        for gone in (silent, oldest, used):
            another = await server.connect()
            assert (await another.get("/info")).status == 200
            assert await gone.stream.receive_some(10) == b"", "it has waited longest"
            await another.send("POST", "/generate", {"inputs": "x"})
        await until_still(lambda: len(server.engine.live) == 4)
        assert not caplog.messages
        # Nobody waits for a request now: a client waits, and that is said.
        waiting = await server.connect()
        await waiting.send("GET", "/info")
        await until_still(lambda: "no connection can be accepted beside 4" in caplog.text)
        while server.engine.live:
            server.engine.step()
        assert (await asked.answer()).json()["generated_text"] == "Hello world"
        mock_clock.jump(2)
        assert (await waiting.answer()).status == 200


async def test_who_has_just_connected_is_not_closed_for_another_client(mock_clock, caplog):
    acceptor = Acceptor(2)
    async with served(acceptor=acceptor) as server:
        first, second = [await server.connect() for _ in range(2)]
        third = await server.connect()
        await third.send("GET", "/info")
        await until_still(lambda: "no connection can be accepted beside 2" in caplog.text)
        assert (await first.get("/info")).status == 200
        assert (await second.get("/info")).status == 200
        mock_clock.jump(2)
        assert (await third.answer()).status == 200


async def test_a_request_under_way_is_not_idle(patient_clock):
    settings = ServerSettings(keep_alive_timeout=0.3)
    async with served(settings=settings, running=False) as server:
        client = await server.connect()
        await client.send("POST", "/generate_stream", {"inputs": "x"})
        await until(lambda: bool(server.engine.live))
        await trio.sleep(1.0)
        while server.engine.live:
            server.engine.step()
        assert len((await client.answer()).events()) == 12


async def test_pipelined_requests_are_answered_in_order(http):
    async with served(http=http) as server:
        stream = await server.raw()
        await stream.send_all(
            Client.request("POST", "/generate", b'{"inputs":"x"}', {})
            + Client.request("POST", "/generate_stream", b'{"inputs":"x"}', {})
            + Client.request("GET", "/info", None, {"connection": "close"})
        )
        data = await read_all(stream)
    positions = [data.index(mark) for mark in (b'{"generated_text"', b"data: ", b'{"model_id"')]
    assert positions == sorted(positions)
    assert data.count(b"HTTP/1.1 200 ") == 3


async def test_a_pipelined_body_larger_than_the_read_ahead_arrives():
    async with served(http=HttpSettings(payload_limit=10**6), running=False) as server:
        stream = await server.raw()
        text = b"y" * 600_000
        await stream.send_all(Client.request("POST", "/generate", b'{"inputs":"x"}', {}))
        await until(lambda: bool(server.engine.live))
        async with trio.open_nursery() as nursery:
            second = Client.request(
                "POST", "/generate", b'{"inputs":"%b"}' % text, {"connection": "close"}
            )
            nursery.start_soon(stream.send_all, second)
            await trio.sleep(0.05)
            while server.engine.live:
                server.engine.step()
            data = await read_all(stream)
    assert data.count(b"HTTP/1.1 ") == 2
    assert b"Given: 600001 `inputs` tokens" in data


async def test_garbage_is_answered_and_harms_nobody(http):
    async with served(http=http) as server:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
            b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: -5\r\n\r\n",
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n",
        ):
            stream = await server.raw()
            await stream.send_all(garbage)
            assert b" 200 " not in await read_all(stream)
        client = await server.connect()
        assert (await client.get("/health")).status == 200


# ---- readers that do not read ------------------------------------------------------------------


async def stuck(server) -> trio.SocketStream:
    """Return a connection that asks for a stream of megabytes and does not read it."""
    stream = trio.socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await stream.connect(("127.0.0.1", server.port))
    connected = trio.SocketStream(stream)
    await connected.send_all(Client.request("POST", "/generate_stream", BIG, {}))
    return connected


BIG_TOKENS = 60
BIG = b'{"inputs":"x","parameters":{"max_new_tokens":%d}}' % BIG_TOKENS


def big_engine() -> FakeEngine:
    """Return an engine whose streams are of 6 MB, more than the buffers of a connection hold."""
    engine = FakeEngine(lambda prompt: "z" * 200)

    def pad(stream):
        token = FakeEngine.next_token(engine, stream)
        token.text = "z" * 100_000
        return token

    engine.next_token = pad  # type: ignore[method-assign]
    return engine


async def test_a_slow_reader_gets_everything_in_order(http):
    engine = big_engine()
    settings = HttpSettings(
        stream_backlog=1 << 24, direct_writes=http.direct_writes, shortcut=http.shortcut
    )
    async with served(engine, settings) as server:
        slow = await stuck(server)
        await until(lambda: bool(engine.submitted) and not engine.live)
        fast = await server.connect()
        expected = (await fast.post("/generate_stream", BIG)).text
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            data += await slow.receive_some(4096 if len(data) < 100_000 else 1 << 20)
    assert without_receipts(unchunked(bytes(data))).decode() == expected


async def test_a_reader_that_falls_too_far_behind_is_dropped_and_slows_nobody(http):
    settings = HttpSettings(
        stream_backlog=1_500_000, direct_writes=http.direct_writes, shortcut=http.shortcut
    )
    engine = big_engine()
    async with served(engine, settings, running=False) as server:
        server.nursery.start_soon(engine.run, 0.002)
        slow = [await stuck(server) for _ in range(3)]
        fast = await server.connect()
        for _ in range(3):
            assert len((await fast.post("/generate_stream", BIG)).events()) == BIG_TOKENS
        await until(lambda: engine.permits == 0)
        assert len(engine.left) == len(slow), "aborted, not finished"


async def test_a_reader_that_stops_reading_is_dropped_in_the_end(http, patient_clock):
    limits = ServerSettings(limits=ConnectionLimits(send_timeout=0.1))
    engine = big_engine()
    async with served(engine, http, limits) as server:
        slow = await stuck(server)
        await until(lambda: len(engine.submitted) == 1 and engine.permits == 0)
        await trio.sleep(1.0)
        with pytest.raises(trio.BrokenResourceError):
            await read_all(slow)


async def test_shutdown_does_not_wait_for_stuck_readers(http):
    settings = ServerSettings(graceful_timeout=0.1, limits=ConnectionLimits(send_timeout=3600))
    engine = big_engine()
    async with served(engine, http, settings) as server:
        streams = [await stuck(server) for _ in range(4)]
        await until(lambda: len(engine.submitted) == len(streams))
        server.shutdown.set()
        await server.done.wait()
        assert engine.permits == 0


# ---- shutdown ----------------------------------------------------------------------------------


async def test_shutdown_lets_streams_finish_and_refuses_connections():
    async with served(running=False, settings=ServerSettings(graceful_timeout=60)) as server:
        idle = await server.connect()
        assert (await idle.get("/info")).status == 200
        client = await server.connect()
        await client.send("POST", "/generate_stream", {"inputs": "x"})
        await until(lambda: bool(server.engine.live))
        server.shutdown.set()
        assert await idle.stream.receive_some(10) == b"", "an idle connection is closed at once"
        with pytest.raises(OSError):
            await server.raw()
        while server.engine.live:
            server.engine.step()
        assert len((await client.answer()).events()) == 12
        await server.done.wait()


async def test_the_end_of_grace_ends_streams_with_an_event():
    engine = FakeEngine()

    def fail_all() -> None:
        engine.fail_after = 0
        engine.step()

    settings = ServerSettings(graceful_timeout=0.05)
    async with served(engine, running=False, settings=settings, on_grace_end=fail_all) as server:
        client = await server.connect()
        await client.send("POST", "/generate_stream", {"inputs": "x"})
        await until(lambda: bool(engine.live))
        server.shutdown.set()
        answer = await client.answer()
        assert answer.events()[-1].startswith(b'{"error":"Request failed during generation')
        await server.done.wait()


# ---- listening ---------------------------------------------------------------------------------


async def test_unix_sockets_are_served_and_removed(tmp_path):
    from tgi_trio.router.http.app import Application
    from tgi_trio.router.http.wire.server import serve

    path = str(tmp_path / "server.sock")
    for _ in range(2):  # the second time a stale file is in the way
        engine, shutdown = FakeEngine(), trio.Event()
        with bind_sockets([f"unix:{path}", "127.0.0.1:0"]) as sockets:
            for each in sockets:
                each.listen()
            with pytest.raises(ConfigurationError, match="another server listens"):
                listen([f"unix:{path}"])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                nursery.start_soon(serve, Application(engine), sockets, ServerSettings(), shutdown)
                client = Client(await trio.open_unix_socket(path))
                assert len((await client.post("/generate_stream", {"inputs": "x"})).events()) == 12
                await client.stream.aclose()
                shutdown.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                nursery.cancel_scope.cancel()
        assert not Path(path).exists()
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(path)
        stale.close()


async def test_a_unix_socket_whose_file_is_gone_or_another_server_s_ends_like_any_other(tmp_path):
    from tgi_trio.router.http.app import Application
    from tgi_trio.router.http.wire.server import serve

    path = tmp_path / "server.sock"
    for replaced in (False, True):
        engine, shutdown = FakeEngine(), trio.Event()
        with bind_sockets([f"unix:{path}"]) as sockets:
            sockets[0].listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                async with trio.open_nursery() as serving:
                    app = Application(engine)
                    await serving.start(serve, app, sockets, ServerSettings(), shutdown)
                    path.rename(tmp_path / "old.sock")  # keeps the inode from being used again
                    if replaced:
                        (other,) = listen([f"unix:{path}"])
                    shutdown.set()
                nursery.cancel_scope.cancel()
        assert path.exists() is replaced
    other.close()
