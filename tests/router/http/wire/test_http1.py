"""HTTP/1.1 as our own exchange speaks it: whatever the framing, the same answers."""

from __future__ import annotations

import itertools

import h11
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.http.served import Client, served
from tgi_trio.router.http.call import HttpSettings

pytestmark = pytest.mark.trio

BODY = b'{"inputs":"x"}'
GENERATE = Client.request("POST", "/generate", BODY, {})


async def answers(port: int, pieces: list[bytes], methods: list[str]) -> list[tuple[int, bytes]]:
    """Send `pieces` one by one; returns (status, body) of the answer to each of `methods`."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    found: list[tuple[int, bytes]] = []

    async def send() -> None:
        for piece in pieces:
            await stream.send_all(piece)
            await trio.sleep(0)
            await trio.sleep(0)

    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(send)
        data = b""
        for method in methods:
            parser = h11.Connection(h11.CLIENT)
            parser.send(h11.Request(method=method, target="/", headers=[("host", "t")]))
            parser.send(h11.EndOfMessage())
            if data:
                parser.receive_data(data)
            status, body = 0, b""
            while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    parser.receive_data(await stream.receive_some(65536))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
            data = parser.trailing_data[0]
            found.append((status, body))
    return found


CHUNKED = (
    b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n4\r\n" + BODY[:4] + b"\r\na;x=y\r\n" + BODY[4:] + b"\r\n"
    b"0\r\nauthorization: a trailer\r\n\r\n"
)
WITH_UPGRADE = Client.request(
    "POST", "/generate", BODY, {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}
)
STREAMED = Client.request("POST", "/generate_stream", BODY, {})
SEVERAL = [
    ("POST", GENERATE),
    ("POST", CHUNKED),
    ("HEAD", Client.request("HEAD", "/info", None, {})),
    ("POST", WITH_UPGRADE),
    ("POST", STREAMED),
    ("GET", Client.request("GET", "/nowhere", None, {})),
    ("POST", GENERATE),
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(1, sum(len(r) for _, r in SEVERAL) - 1), max_size=12))
async def test_answers_do_not_depend_on_how_requests_are_cut(cuts):
    whole = b"".join(request for _, request in SEVERAL)
    bounds = [0, *sorted(set(cuts)), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(bounds)]

    async with served() as server:
        found = await answers(server.port, pieces, [method for method, _ in SEVERAL])
    assert [status for status, _ in found] == [200, 200, 200, 200, 200, 404, 200]
    assert b"Hello world" in found[0][1]
    assert [found[i][1] for i in (1, 3, 6)] == [found[0][1]] * 3
    assert found[2][1] == b"", "a HEAD has no body"
    assert found[4][1].count(b"data: ") == 12


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /info HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET /info HTTP/1.1\r\nhost: t\r\nHost: u\r\n\r\n", 400),  # which of them?
        (b"GET /info HTTP/1.0\r\nhost: t\r\nhost: t\r\n\r\n", 400),
        (b"GET /info HTTP/2.0\r\nhost: t\r\n\r\n", 505),
        (b"GET /info HTTP/2.0\r\nhost: t\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 505),
        (b"GET /info HTTP/0.9\r\n\r\n", 505),
        (b"GET /info HTTP/1.1\r\nhost: t\r\nbad header\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n"
         b"transfer-encoding: chunked\r\n\r\n", 400),  # smuggling
        (b"POST /generate HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip\r\n\r\n0", 501),
        (b"POST /generate HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip, chunked\r\n\r\n0", 501),
        (b"POST /generate HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip\r\n"
         b"transfer-encoding: chunked\r\n\r\n0", 400),
        (b"GET /info HTTP/1.1\r\nhost: t\r\nx: " + b"y" * 200_000, 431),
        (b"GET /info HTTP/1.1\r\nhost: t\r\n" + b"a: b\r\n" * 50_000, 431),
    ],
)  # fmt: skip
async def test_what_is_no_request_is_refused(request_, status):
    async with served() as server:
        stream = await server.raw()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, request_)
            data = b""
            while more := await stream.receive_some(65536):
                data += more
        assert data.startswith(b"HTTP/1.1 %d " % status), data[:100]
        assert b"connection: close" in data
        client = await server.connect()
        assert (await client.get("/health")).status == 200


GARBAGE = b"\0\1\2 no HTTP\r\n\r\n"


@pytest.mark.parametrize("garbage", [GARBAGE, b"GET /" + b"x" * 100_000])
async def test_what_was_asked_before_garbage_is_answered(garbage):
    async with served(running=False) as server:
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate_stream", BODY, {}) + GENERATE)
        while not server.engine.live:
            await trio.sleep(0.001)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, garbage + GENERATE)
            await trio.sleep(0.05)
            assert len(server.engine.live) == 1 and not server.engine.left
            nursery.start_soon(server.engine.run)
            data = b""
            while more := await stream.receive_some(65536):
                data += more
            nursery.cancel_scope.cancel()
        first, second, refusal = data.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"200 ") and first.endswith(b"0\r\n\r\n")
        assert second.startswith(b"200 ") and b"generated_text" in second
        assert refusal.startswith(b"431 " if b"xxx" in garbage else b"400 ")
        assert b"connection: close" in refusal and not server.engine.permits


async def test_a_client_that_leaves_behind_its_garbage_is_gone():
    async with served(running=False) as server:
        stream = await server.raw()
        await stream.send_all(Client.request("POST", "/generate_stream", BODY, {}) + GARBAGE)
        while not server.engine.live:
            await trio.sleep(0.001)
        await stream.aclose()
        while server.engine.permits:
            await trio.sleep(0.001)
        assert len(server.engine.left) == 1


BROKEN = CHUNKED.replace(b"a;x=y\r\n", b"no number\r\n")


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("before", [0, 1, 2])
async def test_a_body_without_an_end_is_refused_behind_what_was_asked_before(before, cut):
    async with served() as server:
        stream = await server.raw()
        head, behind = BROKEN.partition(b"no number")[::2]
        await stream.send_all(GENERATE * before + head)
        if cut:
            await trio.sleep(0.02)  # it has its turn, and waits for its body
        await stream.send_all(b"no number" + behind + GENERATE)
        data = b""
        while more := await stream.receive_some(65536):
            data += more
        statuses = [each[:3] for each in data.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200"] * before + [b"400"]
        assert not server.engine.permits


async def test_a_stray_body_behind_the_last_request_is_no_request():
    async with served() as server:
        stream = await server.raw()
        last = Client.request("POST", "/generate", BODY, {"connection": "close"})
        await stream.send_all(last + GENERATE)
        data = b""
        while more := await stream.receive_some(65536):
            data += more
        assert data.count(b"HTTP/1.1 ") == 1 and b"connection: close" in data
        assert len(server.engine.submitted) == 1


async def test_a_headers_value_cannot_break_out():
    settings = HttpSettings(compute_type="gpu\r\nx-evil: 1")
    async with served(http=settings) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "x"})
        assert answer.status == 500 and "x-evil" not in answer.headers


async def test_many_pipelined_requests_wait_within_bounds(patient_clock):
    async with served(running=False) as server:
        stream = await server.raw()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await stream.send_all(GENERATE * 100)
                sent += 100

        with trio.move_on_after(0.3):
            await flood()
        while not server.engine.submitted:
            await trio.sleep(0.001)
        # What the kernel's buffers and ours take, and no more.
        assert 0 < sent * len(GENERATE) < 1 << 24
        assert len(server.engine.submitted) == 1
        stream.socket.close()
