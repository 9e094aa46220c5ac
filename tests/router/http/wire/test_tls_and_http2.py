"""What goes through TLS or HTTP/2: the same conduct on the plain path."""

from __future__ import annotations

import json
from functools import partial

import h2.connection
import h2.events
import pytest
import trio
from h2.settings import SettingCodes
from priority.priority import PriorityTree

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, STREAM, Client, served, until
from tests.router.http.wire.http2_client import CERTIFICATE, Http2, tls
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.wire.connection import ConnectionLimits
from tgi_trio.router.http.wire.server import ServerSettings

pytestmark = pytest.mark.trio

IMPATIENT = ServerSettings(keep_alive_timeout=0.3, limits=ConnectionLimits(send_timeout=0.3))
LONG = ServedLimits(max_input_tokens=1000, max_total_tokens=200_000)
TEXT = "z" * 150_000


async def test_tls_serves_streams_and_notices_who_leaves():
    settings = ServerSettings(certfile=CERTIFICATE, keyfile=CERTIFICATE)
    async with served(settings=settings) as server:
        stream = trio.SSLStream(await server.raw(), tls("http/1.1"), https_compatible=True)
        client = Client(stream)
        assert len((await client.post("/generate_stream", {"inputs": "x"})).events()) == 12
        assert (await client.post("/generate", {"inputs": "x"})).status == 200
        server.engine.answer = lambda prompt: ENDLESS
        await stream.send_all(Client.request("POST", "/generate_stream", STREAM, {}))
        await until(lambda: bool(server.engine.live))
        stream.transport_stream.socket.close()
        await until(lambda: server.engine.permits == 0)


async def test_a_client_that_never_shakes_hands_does_not_hold_shutdown():
    settings = ServerSettings(certfile=CERTIFICATE, keyfile=CERTIFICATE, graceful_timeout=0.1)
    async with served(settings=settings) as server:
        stream = await server.raw()
        await trio.sleep(0.01)
        server.shutdown.set()
        await server.done.wait()
        assert stream is not None


async def test_a_bad_certificate_names_the_flag():
    with pytest.raises(BaseException) as caught:
        async with served(settings=ServerSettings(certfile="/nowhere.pem")):
            pass
    text = "".join(str(error) for error in _leaves(caught.value))
    assert "--ssl-certfile" in text


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


@pytest.mark.parametrize("secure", [False, True])
async def test_http2_streams_end_and_errors_end_them_too(secure):
    settings = ServerSettings(certfile=CERTIFICATE, keyfile=CERTIFICATE) if secure else None
    async with served(settings=settings) as server:
        stream: trio.abc.Stream = await server.raw()
        if secure:
            stream = trio.SSLStream(stream, tls("h2"), https_compatible=True)
        client = Http2(stream)
        first = await client.post("/generate_stream", b'{"inputs":"x"}')
        second = await client.post("/generate", b'{"inputs":"x"}')
        await client.pump(lambda: {first, second} <= client.ended)
        assert client.body[first].count(b"data: ") == 12
        assert client.body[second] == b'{"generated_text":"Hello world"}'
        server.engine.fail_after = 2
        third = await client.post("/generate_stream", b'{"inputs":"x"}')
        await client.pump(lambda: third in client.ended)
        assert b'"error_type":"generation"' in client.body[third]


async def test_http2_floods_of_frames_leave_the_others_their_turns(monkeypatch):
    """Small frames cost far more than their bytes: tens of kilobytes of them are no single turn."""
    async with served() as server, trio.open_nursery() as nursery:
        turns, taken = 0, dict[int, int]()
        receive = h2.connection.H2Connection.receive_data

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        def count(self: h2.connection.H2Connection, data: bytes) -> list[h2.events.Event]:
            if not self.config.client_side:
                taken[turns] = taken.get(turns, 0) + len(data)
            return receive(self, data)

        monkeypatch.setattr(h2.connection.H2Connection, "receive_data", count)
        nursery.start_soon(take_turns)
        client = Http2(await server.raw())
        for number in range(3000):
            client.connection.prioritize(1, weight=1 + number % 256)
        client.connection.ping(b"the last")
        await client.flush()
        id = await client.post("/generate", b'{"inputs":"x"}')
        await client.pump(lambda: id in client.ended)
        assert client.statuses[id] == 200
        assert sum(taken.values()) > 40_000 and max(taken.values()) <= 1 << 13
        nursery.cancel_scope.cancel()


async def test_http2_resets_abort_the_generation():
    async with served(FakeEngine(), running=False) as server:
        client = Http2(await server.raw())
        id = await client.post("/generate_stream", b'{"inputs":"x"}')
        await until(lambda: bool(server.engine.live))
        client.connection.reset_stream(id)
        await client.flush()
        await until(lambda: server.engine.permits == 0)
        id = await client.post("/generate", b'{"inputs":"x"}')
        await until(lambda: bool(server.engine.live))
        await client.stream.aclose()
        await until(lambda: server.engine.permits == 0)


@pytest.mark.parametrize("whose", ["client", "server"])
async def test_http2_streams_that_were_reset_are_forgotten(whose, monkeypatch, patient_clock):
    """A connection that remembered a thousand of them would end; here eight are too many."""
    tree = partial(PriorityTree, maximum_streams=8)
    monkeypatch.setattr("hypercorn.protocol.h2.priority.PriorityTree", tree)
    engine = FakeEngine(lambda prompt: TEXT if whose == "server" else ENDLESS, limits=LONG)
    engine.tokens_per_step = 10_000
    async with served(engine, settings=IMPATIENT, running=whose == "server") as server:
        client = Http2(await server.raw())
        for _ in range(10):
            id = await client.post("/generate_stream", b'{"inputs":"x"}')
            if whose == "client":
                await until(lambda: bool(engine.live))
                client.connection.reset_stream(id)
                await client.flush()
            else:
                await client.pump(partial(client.reset.__contains__, id), acknowledge=False)
                if read := len(client.body[id]):  # others need the connection's window
                    client.connection.increment_flow_control_window(read)
                await client.flush()
            await until(lambda: engine.permits == 0)
        answer = await client.post("/nowhere", b"{}")
        await client.pump(lambda: answer in client.ended, acknowledge=False)
        assert answer not in client.reset


async def test_http2_bodies_that_come_behind_their_answer_are_dropped():
    """All of it, more than the connection's window: requests beside it and after it are served."""
    async with served(FakeEngine(lambda prompt: ENDLESS)) as server:
        client = Http2(await server.raw())
        beside = await client.post("/generate_stream", b'{"inputs":"x"}')
        late = client.connection.get_next_available_stream_id()
        head = [(":method", "POST"), (":path", "/nowhere"), (":scheme", "http")]
        client.connection.send_headers(late, [*head, (":authority", "t")])
        client.body[late] = b""
        await client.flush()
        await client.pump(lambda: late in client.ended)
        for _ in range(20):
            await client.pump(lambda: client.connection.local_flow_control_window(late) >= 16_000)
            client.connection.send_data(late, bytes(16_000))
            await client.flush()
        client.connection.end_stream(late)
        server.engine.answer = lambda prompt: "Hello"
        after = await client.post("/generate", b'{"inputs":"y"}')
        await client.pump(lambda: after in client.ended)
        assert client.body[after] == b'{"generated_text":"Hello"}'
        assert beside not in client.ended


async def test_http2_readers_that_never_read_are_bounded():
    engine = FakeEngine(lambda prompt: "z" * 2000)
    engine.tokens_per_step = 20
    settings = HttpSettings(stream_backlog=10_000)
    async with served(engine, settings) as server:
        client = Http2(await server.raw())
        id = await client.post("/generate_stream", STREAM)
        await client.pump(lambda: id in client.ended, acknowledge=False)
        await until(lambda: engine.permits == 0)
        assert len(engine.left) == 1, "aborted, not finished"
        assert len(client.body[id]) <= 65_535


@pytest.mark.parametrize(
    ("route", "text"), [("/generate", TEXT), ("/generate_stream", "z" * 4_000)]
)
async def test_http2_readers_that_read_slowly_get_all_of_it(route, text, patient_clock):
    engine = FakeEngine(lambda prompt: text, limits=LONG)
    engine.tokens_per_step = 10_000
    async with served(engine, settings=IMPATIENT) as server:
        client = Http2(await server.raw())
        id = await client.post(route, b'{"inputs":"x"}')
        began = trio.current_time()
        await client.pump(lambda: len(client.body[id]) == 65_535, acknowledge=False)
        while id not in client.ended:
            await trio.sleep(0.05)
            for stream_id in (id, None):
                client.connection.increment_flow_control_window(4_000, stream_id)
            await client.flush()
            await client.pump_some(id)
        assert trio.current_time() - began > 0.6, "longer than a client may do nothing"
        assert id not in client.reset
        last = client.body[id].split(b"data:")[-1]
        assert json.loads(last)["generated_text"] == text


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_http2_readers_that_stop_are_told_that_something_is_missing(route, patient_clock):
    engine = FakeEngine(lambda prompt: TEXT, limits=LONG)
    engine.tokens_per_step = 10_000
    async with served(engine, settings=IMPATIENT) as server:
        client = Http2(await server.raw())
        id = await client.post(route, b'{"inputs":"x"}')
        await client.pump(lambda: id in client.reset, acknowledge=False)
        assert len(client.body[id]) <= 65_535
        await until(lambda: engine.permits == 0)
        client.connection.increment_flow_control_window(65_000)
        engine.answer = lambda prompt: "Hello"
        other = await client.post("/generate", b'{"inputs":"y"}')
        await client.pump(lambda: other in client.ended, acknowledge=False)
        assert client.body[other] == b'{"generated_text":"Hello"}' and other not in client.reset


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_http2_readers_that_leave_without_reading_are_gone_at_once(route, patient_clock):
    async with served(settings=ServerSettings(graceful_timeout=1000.0)) as server:
        stream = await server.raw()
        client = Http2(stream)
        client.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        id = await client.post(route, b'{"inputs":"x"}')
        await client.pump(lambda: id in client.statuses)
        await until(lambda: server.engine.permits == 0)
        began = trio.current_time()
        stream.socket.close()
        server.shutdown.set()
        await server.done.wait()
        assert trio.current_time() - began < ConnectionLimits().send_timeout / 2


WEBSOCKET = [
    *((":protocol", "websocket"), (":path", "/generate"), (":scheme", "http")),
    ("sec-websocket-version", "13"),
]


@pytest.mark.parametrize("more", [WEBSOCKET, []])
async def test_http2_websockets_and_tunnels_are_refused(
    more: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
):
    async with served() as server:
        client = Http2(await server.raw())
        id = client.connection.get_next_available_stream_id()
        client.connection.send_headers(id, [(":method", "CONNECT"), (":authority", "t:80"), *more])
        client.connection.send_data(id, b"x")
        client.body[id] = b""
        await client.flush()
        await client.pump(lambda: id in client.statuses)
        assert client.statuses[id] == 501
        other = await client.post("/generate", b'{"inputs":"x"}')
        await client.pump(lambda: other in client.ended)
        assert client.statuses[other] == 200
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_http2_bodies_that_are_refused_leave_other_streams_alone(
    caplog: pytest.LogCaptureFixture,
):
    # Proxies send requests of many clients over one connection.
    async with served(running=False) as server:
        client = Http2(await server.raw())
        other = await client.post("/generate_stream", b'{"inputs":"x"}')
        await until(lambda: bool(server.engine.live))
        id = await client.post("/generate", b"x" * 2_500_000)
        await client.pump(lambda: id in client.ended)
        assert client.statuses[id] == 413
        while server.engine.live:
            server.engine.step()
        await client.pump(lambda: other in client.ended)
        assert client.body[other].count(b"data: ") == 12 and other not in client.reset
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
