"""GOAWAY (RFC 9113, 6.8): who says goodbye, client or server, has running streams finished."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes
from hyperframe.frame import PingFrame, WindowUpdateFrame

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, Server, served, until
from tests.router.http.wire.http2_client import CERTIFICATE, Http2, tls
from tgi_trio.router.http.wire.server import ServerSettings

pytestmark = pytest.mark.trio

GET = [(":method", "GET"), (":path", "/info"), (":scheme", "http"), (":authority", "t")]
BODY = b'{"inputs":"x"}'
PATIENT = ServerSettings(graceful_timeout=10_000.0)
SECURE = ServerSettings(graceful_timeout=10_000.0, certfile=CERTIFICATE, keyfile=CERTIFICATE)


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def connect(server: Server, secure: bool = False) -> Http2:
    stream: trio.abc.Stream = await server.raw()
    if secure:
        stream = trio.SSLStream(stream, tls("h2"), https_compatible=True)
    return Http2(stream)


async def finish(server: Server) -> None:
    while server.engine.live:
        server.engine.step()
        await trio.sleep(0.001)


@pytest.mark.parametrize("secure", [False, True])
async def test_streams_of_a_client_that_says_goodbye_go_on_to_their_end(secure):
    settings = SECURE if secure else PATIENT
    async with served(settings=settings, running=False) as server:
        client = await connect(server, secure)
        first = await client.post("/generate_stream", BODY)
        second = await client.post("/generate", BODY)
        await until(lambda: len(server.engine.live) == 2)
        server.engine.step()
        await client.pump(lambda: client.body[first] != b"")
        await client.say_goodbye()
        await client.pump(lambda: bool(client.goodbyes))
        assert client.goodbyes == [(second, 0)]
        await finish(server)
        await client.pump_all()
        assert client.ended == {first, second} and not client.reset
        assert client.body[first].count(b"data: ") == 12
        assert client.body[second] == b'{"generated_text":"Hello world"}'
        assert not server.engine.left


async def test_what_a_client_sends_behind_its_goodbye_is_read():
    """Acknowledged settings, pings and windows, without which a long answer would stand still."""
    engine = FakeEngine(lambda prompt: "z" * 600)
    engine.tokens_per_step = 100
    async with served(engine, settings=PATIENT, running=False) as server:
        client = await connect(server)
        id = await client.post("/generate_stream", BODY)
        await until(lambda: bool(server.engine.live))
        await client.say_goodbye(more=PingFrame(0, opaque_data=b"12345678").serialize())
        await client.pump(lambda: bool(client.goodbyes))
        await client.stream.send_all(WindowUpdateFrame(0, window_increment=1000).serialize())
        await finish(server)
        await client.pump_all()
        assert client.ended == {id} and len(client.body[id]) > 65_535
        assert client.pongs == [b"12345678"]


async def test_requests_behind_a_goodbye_are_refused_as_ones_to_send_again():
    async with served(settings=PATIENT, running=False) as server:
        client = await connect(server)
        first = await client.post("/generate_stream", BODY)
        await until(lambda: bool(server.engine.live))
        late = client.connection.get_next_available_stream_id()
        client.connection.send_headers(late, GET, end_stream=True)
        await client.say_goodbye(more=client.connection.data_to_send())
        await client.pump(lambda: late in client.ended)
        assert client.reset == {late: ErrorCodes.REFUSED_STREAM}
        await finish(server)
        await client.pump_all()
        assert client.goodbyes == [(first, 0)] and client.body[first].count(b"data: ") == 12


async def test_an_idle_client_that_says_goodbye_is_left_at_once():
    async with served(settings=PATIENT) as server:
        client = await connect(server)
        id = await client.post("/generate", BODY)
        await client.pump(lambda: id in client.ended)
        await client.say_goodbye()
        await client.pump_all()
        assert client.goodbyes == [(id, 0)]


async def test_a_client_that_says_goodbye_and_hangs_up_leaves_nothing_behind():
    async with served(FakeEngine(lambda prompt: ENDLESS), settings=PATIENT) as server:
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = tasks()
        client = await connect(server)
        id = await client.post("/generate_stream", BODY)
        await client.pump(lambda: client.body[id] != b"")
        await client.say_goodbye()
        await client.stream.aclose()
        await until(lambda: server.engine.permits == 0 and tasks() == before)
        assert len(server.engine.left) == 1


async def test_a_client_that_resets_its_last_stream_behind_a_goodbye_is_left():
    async with served(FakeEngine(lambda prompt: ENDLESS), settings=PATIENT) as server:
        client = await connect(server)
        id = await client.post("/generate_stream", BODY)
        await client.pump(lambda: client.body[id] != b"")
        await client.say_goodbye()
        client.connection.reset_stream(id)
        await client.flush()
        await client.pump_all()
        await until(lambda: server.engine.permits == 0)


async def test_a_goodbye_for_an_error_aborts_what_runs():
    """Whoever sends it closes the connection, and reads no more."""
    async with served(FakeEngine(lambda prompt: ENDLESS), settings=PATIENT) as server:
        client = await connect(server)
        id = await client.post("/generate_stream", BODY)
        await client.pump(lambda: client.body[id] != b"")
        await client.say_goodbye(ErrorCodes.INTERNAL_ERROR)
        await until(lambda: server.engine.permits == 0)
        assert len(server.engine.left) == 1


@pytest.mark.parametrize("secure", [False, True])
async def test_a_server_that_drains_says_so_and_finishes_what_runs(secure):
    settings = SECURE if secure else PATIENT
    async with served(settings=settings, running=False) as server:
        client = await connect(server, secure)
        id = await client.post("/generate_stream", BODY)
        await until(lambda: bool(server.engine.live))
        server.shutdown.set()
        await client.pump(lambda: bool(client.goodbyes))
        assert client.goodbyes == [(id, 0)]
        late = await client.post("/generate", BODY)
        await client.pump(lambda: late in client.ended)
        assert client.reset == {late: ErrorCodes.REFUSED_STREAM}
        assert len(server.engine.submitted) == 1
        await finish(server)
        await client.pump_all()
        assert client.body[id].count(b"data: ") == 12 and client.ended == {id, late}
        assert len(client.goodbyes) == 1
        await client.stream.aclose()
        await server.done.wait()


async def test_a_server_that_drains_does_not_wait_for_a_client_that_stays(patient_clock):
    async with served(settings=PATIENT, running=False) as server:
        client = await connect(server)
        await client.post("/generate_stream", BODY)
        await until(lambda: bool(server.engine.live))
        server.shutdown.set()
        began = trio.current_time()
        await finish(server)
        await server.done.wait()  # the client neither reads nor closes
        assert trio.current_time() - began < 100


@pytest.mark.parametrize("why", ["it drains", "the client is idle for too long"])
async def test_a_server_that_closes_an_idle_connection_says_what_was_its_last_request(
    why, patient_clock
):
    """What a client has sent by then, and was not read, may be sent again elsewhere."""
    idle = ServerSettings(keep_alive_timeout=0.3, graceful_timeout=10_000.0)
    async with served(settings=PATIENT if why == "it drains" else idle) as server:
        client = await connect(server)
        id = await client.post("/generate", BODY)
        await client.pump(partial(client.ended.__contains__, id))
        if why == "it drains":
            server.shutdown.set()
        await client.pump_all()
        assert client.goodbyes == [(id, 0)]
