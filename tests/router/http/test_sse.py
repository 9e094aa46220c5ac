"""The body of a stream: both ways of sending it, its bounds, its silence."""

from __future__ import annotations

import socket

import orjson
import pytest
import pytest_trio
import trio
import trio.testing

from tgi_trio.router.http.sse import KEEP_ALIVE, EventBody, StreamLimits
from tgi_trio.router.http.wire.transport import Transport, inner_socket

LIMITS = StreamLimits(backlog=1 << 20, silence=15.0)


class Pair(Transport):
    """A transport over a socket pair, whose other end the test reads."""

    def __init__(self, buffer: int | None = None) -> None:
        ours, self.theirs = socket.socketpair()
        if buffer is not None:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        ours.setblocking(False)
        self.theirs.setblocking(False)
        self.ours = trio.socket.from_stdlib_socket(ours)
        self.was_cut = False

    def direct_socket(self) -> trio.socket.SocketType:
        return self.ours

    def cut(self) -> None:
        self.was_cut = True

    def read(self, size: int = 1 << 20) -> bytes:
        try:
            return self.theirs.recv(size)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class Sent:
    """An ASGI `send` that remembers."""

    def __init__(self) -> None:
        self.data = b""

    async def __call__(self, message) -> None:
        await trio.lowlevel.checkpoint()
        self.data += message["body"]


def unchunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, data = body + data[:length], data[length:]
        assert data[:2] == b"\r\n"
        data = data[2:]
    return body


@pytest_trio.trio_fixture
async def pair():
    made: list[Pair] = []

    def make(buffer: int | None = None) -> Pair:
        made.append(Pair(buffer))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def start(
    nursery: trio.Nursery, body: EventBody, transport: Transport, sent: Sent | None = None
) -> list[bytes]:
    """Run the body in a task; returns a list that will hold its result."""
    result: list[bytes] = []
    sent = sent or Sent()

    async def run() -> None:
        result.append(await body.run(sent, transport))

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()
    return result


@pytest.mark.trio
async def test_events_are_written_within_the_call(pair):
    transport, body = pair(), EventBody(LIMITS)
    body.write(b"data: early\n\n")  # before the headers have left
    async with trio.open_nursery() as nursery:
        result = await start(nursery, body, transport)
        assert transport.read() == b"d\r\ndata: early\n\n\r\n"
        body.write(b"data: 1\n\n")
        assert transport.read() == b"9\r\ndata: 1\n\n\r\n", "no task had a turn in between"
        body.finish(b"data: 2\n\n", lambda: b"data: [DONE]\n\n")
        assert transport.read() == b"", "the last events go with the end of the response"
    assert result == [b"data: 2\n\ndata: [DONE]\n\n"]
    assert not body.failed


@pytest.mark.trio
@pytest.mark.parametrize("direct", [True, False])
async def test_no_event_has_what_clients_take_for_the_end_of_a_line(pair, direct):
    """Python's `splitlines`, and with it httpx, ends lines where the specification does not."""
    ends, others = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "“ĨĩâÂ” \u2027\u202a\U00012028"
    texts = [ends, others, f"{others}{ends}", "plain"]
    transport, body = pair(), EventBody(LIMITS)
    async with trio.open_nursery() as nursery:
        result = await start(nursery, body, transport) if direct else None
        for text in texts:
            body.write(b"data: %b\n\n" % orjson.dumps(text))
        body.finish(b"data: %b\n\n" % orjson.dumps(ends))
        result = result if result is not None else await start(nursery, body, transport)
    received = (unchunk(transport.read()) + result[0]).decode()
    lines = [line.removeprefix("data: ") for line in received.splitlines() if line]
    assert [orjson.loads(line) for line in lines] == [*texts, ends]
    assert others in received


@pytest.mark.trio
async def test_a_short_write_is_continued_by_the_task_in_order(pair):
    transport, body = pair(buffer=4096), EventBody(LIMITS)
    events = [b"data: %d %b\n\n" % (i, b"x" * 3000) for i in range(30)]
    received = b""
    async with trio.open_nursery() as nursery:
        result = await start(nursery, body, transport)
        for event in events:
            body.write(event)
        body.finish(b"data: end\n\n")
        while not result:
            await trio.testing.wait_all_tasks_blocked()
            received += transport.read(1500)
        received += transport.read()
    assert unchunk(received) + result[0] == b"".join(events) + b"data: end\n\n"


@pytest.mark.trio
async def test_after_catching_up_writing_is_direct_again(pair):
    transport, body = pair(buffer=4096), EventBody(LIMITS)
    async with trio.open_nursery() as nursery:
        await start(nursery, body, transport)
        body.write(b"x" * 50_000)
        size = 0
        while size < 50_000:
            size += len(transport.read())
            await trio.testing.wait_all_tasks_blocked()
        body.write(b"data: now\n\n")
        assert transport.read() == b"b\r\ndata: now\n\n\r\n"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("started", [False, True])
async def test_the_backlog_is_bounded(pair, started):
    transport, body = pair(buffer=4096), EventBody(StreamLimits(backlog=10_000, silence=15.0))
    async with trio.open_nursery() as nursery:
        if started:
            await start(nursery, body, transport)
            body.write(b"x" * 200_000)  # more than the socket takes
            assert not body.failed, "what one write left over is no backlog"
        for _ in range(10):
            body.write(b"x" * 1000)
        assert not body.failed
        body.write(b"x")
        assert body.failed
        body.write(b"ignored")
        body.finish(b"ignored")
        assert transport.was_cut == started
        if not started:
            await start(nursery, body, transport)
    # The nursery has ended: `run` gave up by itself.


@pytest.mark.trio
@pytest.mark.parametrize("direct", [False, True])
async def test_events_larger_than_the_bound_reach_a_reader_that_keeps_up(pair, direct):
    """The last events of /v1/responses are four times the answer, with its logprobs."""
    transport = pair(buffer=4096)
    body = EventBody(StreamLimits(backlog=10_000, silence=15.0, direct=direct))
    sent, received = Sent(), b""
    last = b"data: %b\n\n" % (b"x" * 200_000)
    async with trio.open_nursery() as nursery:
        result = await start(nursery, body, transport, sent)
        body.write(b"data: 1\n\n")
        body.finish(last)
        while not (result or body.failed):
            await trio.testing.wait_all_tasks_blocked()
            received += transport.read()
        received += transport.read()
    assert not body.failed
    written = unchunk(received) if direct else sent.data
    assert written + result[0] == b"data: 1\n\n" + last


@pytest.mark.trio
async def test_a_reader_that_takes_nothing_is_given_up(pair, autojump_clock):
    transport, body = pair(buffer=4096), EventBody(LIMITS)
    transport.send_timeout = 30.0
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await start(nursery, body, transport)
        body.write(b"x" * 200_000)
    assert body.failed
    assert trio.current_time() - began == pytest.approx(30.0)


@pytest.mark.trio
async def test_a_client_that_is_gone_fails_the_body(pair):
    transport, body = pair(), EventBody(LIMITS)
    async with trio.open_nursery() as nursery:
        await start(nursery, body, transport)
        transport.theirs.close()
        body.write(b"x")
        assert body.failed


@pytest.mark.trio
async def test_a_closed_socket_is_never_written_to_under_its_old_number(pair):
    transport, body = pair(), EventBody(LIMITS)
    async with trio.open_nursery() as nursery:
        await start(nursery, body, transport)
        number = transport.ours.fileno()
        transport.ours.close()
        other = pair()
        assert number in (other.ours.fileno(), other.theirs.fileno()), "the number is in use again"
        body.write(b"not for you")
        assert body.failed
        assert other.read() == b""


@pytest.mark.trio
async def test_what_the_installed_trio_forwards_to_is_found(pair):
    ours = pair().ours
    inner = inner_socket(ours)
    assert inner is not None
    assert inner.fileno() == ours.fileno()
    assert inner.gettimeout() == 0.0, "a write may never block"
    ours.close()
    assert inner.fileno() == -1


@pytest.mark.trio
async def test_without_it_events_go_through_the_server(pair, monkeypatch):
    transport, body, sent = pair(), EventBody(LIMITS), Sent()
    monkeypatch.setattr(transport, "direct_socket", object)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(body.run, sent, transport)
        await trio.testing.wait_all_tasks_blocked()
        body.write(b"data: 1\n\n")
        await trio.testing.wait_all_tasks_blocked()
        body.finish(b"")
    assert sent.data == b"data: 1\n\n"
    assert transport.read() == b""


@pytest.mark.trio
@pytest.mark.parametrize("direct", [False, True])
async def test_silence_is_broken_by_comments(pair, direct, autojump_clock):
    transport = pair()
    body = EventBody(StreamLimits(backlog=1 << 20, silence=15.0, direct=direct))
    sent = Sent()

    def seen() -> bytes:
        if direct:
            sent.data += unchunk(transport.read())
        return sent.data

    async with trio.open_nursery() as nursery:
        nursery.start_soon(body.run, sent, transport)
        await trio.sleep(14)
        assert seen() == b""
        await trio.sleep(2)
        assert seen() == KEEP_ALIVE
        await trio.sleep(4)  # 20
        body.write(b"data: x\n\n")
        await trio.sleep(14)
        assert seen() == KEEP_ALIVE + b"data: x\n\n", "an event starts the silence anew"
        await trio.sleep(32)
        assert seen() == KEEP_ALIVE + b"data: x\n\n" + 3 * KEEP_ALIVE
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_body_ends_with_its_last_producer():
    body, sent = EventBody(LIMITS, producers=2), Sent()
    async with trio.open_nursery() as nursery:
        result: list[bytes] = []

        async def run() -> None:
            result.append(await body.run(sent, Transport()))

        nursery.start_soon(run)
        body.finish(b"one ")
        await trio.testing.wait_all_tasks_blocked()
        assert not result
        body.finish(b"two ", lambda: b"end")
    assert sent.data + result[0] == b"one two end"
