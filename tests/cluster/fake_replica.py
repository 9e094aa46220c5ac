"""A replica without a model: its tokens follow from the request and the seed."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

SECRET = "the secret of a cluster"

BODY = b'{"inputs":"x","seed":5}'
# What a replica of eight tokens says of it, without what is for the front alone.
EVENTS = [
    b'data: {"role":"assistant"}\n\n',
    *(b'data: {"text": "<5 %d>"}\n\n' % n for n in range(8)),
    b"data: [DONE]\n\n",
]
WHOLE = b"".join(EVENTS)


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class FakeReplica:
    """Answers `/health`, streams, and whole bodies; what goes wrong is set from outside."""

    def __init__(self) -> None:
        self.health = 200
        self.delay = 0.0  # seconds before it says how it is
        self.info: dict[str, object] | None = None  # what it says that it serves
        self.load = ""  # what fronts are told of it
        self.status = 200  # of everything else
        self.elsewhere = False  # whether it says that another one may know better
        self.silent = trio.Event()  # once set nothing is answered any more
        self.ignored = trio.Event()  # a request has come since
        # Bytes of a stream's body, or of a whole answer and its head; then the connection is reset.
        self.cut_after: int | None = None
        self.pause = 0.0  # seconds before each event
        self.tokens = 8
        self.seen: list[Seen] = []
        self.taken = 0  # connections
        self.polls = 0  # questions how it is that have been answered
        self.left = trio.Event()  # a client has hung up in the middle of an answer
        self.began = trio.Event()  # an event has been sent
        self.address = ""
        self._streams: set[trio.SocketStream] = set()
        self._serving = trio.CancelScope()

    def die(self) -> None:
        """End as a killed process does: every connection is reset, nobody listens."""
        self._serving.cancel()

    def hang_up(self) -> None:
        """End every connection, as an impatient server does; new ones are taken."""
        for each in self._streams:
            each.socket.shutdown(socket.SHUT_RDWR)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        host, port = listeners[0].socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        task_status.started()
        try:
            with self._serving:
                await trio.serve_listeners(self._connection, listeners)
        finally:
            for listener in listeners:
                listener.socket.close()

    async def _connection(self, stream: trio.SocketStream) -> None:
        reset = struct.pack("ii", 1, 0)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self.taken += 1
        self._streams.add(stream)
        try:
            while (seen := await _read_request(stream)) is not None:
                if self.silent.is_set():
                    self.ignored.set()
                    await trio.sleep_forever()
                # What a front asks for itself has no id.
                if seen.path != "/health" and "x-request-id" in seen.headers:
                    self.seen.append(seen)
                await self._answer(stream, seen)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            self.left.set()
        except* _CutOffError:
            pass
        finally:
            self._streams.discard(stream)
            stream.socket.close()

    async def _answer(self, stream: trio.SocketStream, seen: Seen) -> None:
        if seen.path == "/health":
            await trio.sleep(self.delay)
        status = self.health if seen.path == "/health" else self.status
        if seen.path == "/health" and status == 200 and seen.headers.get("x-tgi-front") == SECRET:
            more = f"x-tgi-load: {self.load}\r\n" if self.load else ""
            await stream.send_all(_whole(200, b"", "text/plain", more))
            self.polls += 1
        elif seen.path == "/info" and self.info is not None:
            body = json.dumps(self.info).encode()
            await stream.send_all(_whole(200, body, "application/json"))
        elif status != 200:
            body = json.dumps({"error": f"status {status} of {self.address}"}).encode()
            more = "x-tgi-elsewhere: 1\r\n" if self.elsewhere else ""
            await stream.send_all(_whole(status, body, "application/json", more))
        elif seen.path == "/metrics":
            page = b'# HELP x y\n# TYPE x counter\nx{a="b"} 1\n'
            await stream.send_all(_whole(200, page, "text/plain"))
        elif "stream" in seen.path:
            await self._stream(stream, seen)
        else:
            answer = {"text": "".join(text_of(seen, n) for n in range(self.tokens))}
            whole = _whole(200, json.dumps(answer).encode(), "application/json")
            await stream.send_all(whole[: self.cut_after])
            if self.cut_after is not None:
                raise _CutOffError

    async def _stream(self, stream: trio.SocketStream, seen: Seen) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        head += (
            f"x-request-id: {seen.headers['x-request-id']}\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await stream.send_all(head.encode())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, stream)
            left = self.cut_after
            for event in self._events(seen):
                await trio.sleep(self.pause)
                if self.silent.is_set():
                    await trio.sleep_forever()
                part = event if left is None else event[:left]
                if part:
                    await stream.send_all(b"%x\r\n%b\r\n" % (len(part), part))
                    self.began.set()
                if left is not None:
                    left -= len(part)
                    if left <= 0:
                        raise _CutOffError
            await stream.send_all(b"0\r\n\r\n")
            nursery.cancel_scope.cancel()

    async def _watch(self, stream: trio.SocketStream) -> None:
        if not await stream.receive_some(1):
            raise trio.BrokenResourceError

    def _events(self, seen: Seen) -> list[bytes]:
        marked = seen.headers.get("x-tgi-front") == SECRET
        done = seen.headers.get("x-tgi-emitted")
        ids = "" if done is None else done.partition(":")[2].rstrip("!")
        first = len(ids.split(",")) if ids else 0
        events = [] if done is not None else [b'data: {"role":"assistant"}\n\n']
        for n in range(first, self.tokens):
            end = b"!" if n == self.tokens - 1 else b""
            line = b":i 0:%d%b\n" % (100 + n, end) if marked else b""
            text = json.dumps({"text": text_of(seen, n)}).encode()
            events.append(b"%bdata: %b\n\n" % (line, text))
        return [*events, b"%bdata: [DONE]\n\n" % (b":i 0:!\n" if marked else b"")]


class _CutOffError(Exception):
    pass


def text_of(seen: Seen, n: int) -> str:
    """Return the nth token's text: any replica chooses the same by prompt and seed."""
    seed = json.loads(seen.body or b"{}").get("seed", seen.headers.get("x-tgi-seed", "none"))
    return f"<{seed} {n}>"


def _whole(status: int, body: bytes, kind: str, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


async def _read_request(stream: trio.SocketStream) -> Seen | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    while len(body) < int(headers.get("content-length", "0")):
        body += await stream.receive_some(65536)
    method, path, _ = first.split(" ")
    return Seen(method, path, headers, body)


@dataclass
class Replicas:
    """Some fake replicas."""

    all: list[FakeReplica] = field(default_factory=list)

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self.all]

    @property
    def asked(self) -> list[int]:
        """How many requests each has got."""
        return [len(each.seen) for each in self.all]


@asynccontextmanager
async def fake_replicas(count: int) -> AsyncIterator[Replicas]:
    """Serve `count` replicas until the block is left."""
    replicas = Replicas([FakeReplica() for _ in range(count)])
    async with trio.open_nursery() as nursery:
        for each in replicas.all:
            await nursery.start(partial(each.run))
        try:
            yield replicas
        finally:
            nursery.cancel_scope.cancel()
