"""A served application on loopback, and a client that sees bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson
import trio

from tests.router.http.fake_engine import FakeEngine
from tgi_trio.router.http.app import Application
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.wire.server import ServerSettings, listen, serve
from tgi_trio.router.telemetry.tracing import Tracer

STREAM = b'{"inputs":"x","parameters":{"max_new_tokens":2000}}'
ENDLESS = "ab" * 3000  # the answer of an engine whose streams do not end by themselves


@dataclass
class Answer:
    """A response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)  # chunks of the transfer encoding

    def json(self):
        return orjson.loads(self.body)

    @property
    def text(self) -> str:
        """The body without the receipts of its generations."""
        return without_receipts(self.body).decode()

    def events(self) -> list[bytes]:
        """Return the payloads of the `data:` events, checking the framing of each."""
        frames = self.body.split(b"\n\n")
        assert frames.pop() == b"", "the last event is complete"
        for frame in frames:
            assert frame == b":" or (frame.startswith(b"data: ") and b"\n" not in frame), frame
        return [frame[6:] for frame in frames if frame != b":"]


class Client:
    """One HTTP/1.1 connection, parsed by h11."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.connection = h11.Connection(h11.CLIENT)

    @staticmethod
    def request(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        """Return a request as bytes, for a connection that sends what it likes."""
        if body is not None:
            headers = {"content-type": "application/json", **headers}
            headers = {"content-length": str(len(body)), **headers}
        lines = [f"{method} {path} HTTP/1.1", "host: test"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")

    async def send(self, method: str, path: str, body=None, **headers: str) -> None:
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.connection.our_state is h11.DONE:
            self.connection.start_next_cycle()
        fields = [("host", "test")]
        if data is not None:
            fields.append(("content-length", str(len(data))))
            names = {"content-type": "application/json", **names}
        fields += list(names.items())
        out = self.connection.send(h11.Request(method=method, target=path, headers=fields)) or b""
        if data:
            out += self.connection.send(h11.Data(data=data)) or b""
        out += self.connection.send(h11.EndOfMessage()) or b""
        await self.stream.send_all(out)

    async def event(self):
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            self.connection.receive_data(bytes(await self.stream.receive_some(65536)))
        return event

    async def answer(self) -> Answer:
        head = await self.event()
        assert isinstance(head, h11.Response), head
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        answer = Answer(head.status_code, headers, b"")
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data), event
            if event.chunk_start:
                answer.chunks.append(b"")
            if answer.chunks:
                answer.chunks[-1] += bytes(event.data)
            answer.body += bytes(event.data)
        return answer

    async def ask(self, method: str, path: str, body=None, **headers: str) -> Answer:
        await self.send(method, path, body, **headers)
        return await self.answer()

    async def post(self, path: str, body, **headers: str) -> Answer:
        return await self.ask("POST", path, body, **headers)

    async def get(self, path: str, **headers: Any) -> Answer:
        return await self.ask("GET", path, **headers)


def without_receipts(body: bytes) -> bytes:
    """Return the body of a stream without what tells times."""
    return re.sub(rb',"receipt":\{[^}]*\}', b"", body)


def unchunked(response: bytes) -> bytes:
    """Return the body of a response in chunks, checking the framing."""
    rest = response.partition(b"\r\n\r\n")[2]
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if length == 0:
            assert rest == b""
            return body


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself; `served` bounds the wait."""
    while not condition():
        await trio.sleep(0.001)


async def read_until(stream: trio.abc.Stream, what: bytes) -> bytes:
    data = b""
    while what not in data:
        more = await stream.receive_some(65536)
        assert more, data
        data += more
    return data


async def read_all(stream: trio.abc.Stream) -> bytes:
    data = b""
    while more := await stream.receive_some(65536):
        data += more
    return data


@dataclass
class Server:
    """A served application."""

    engine: FakeEngine
    port: int
    shutdown: trio.Event
    done: trio.Event
    nursery: trio.Nursery
    app: Application
    opened: list[trio.SocketStream] = field(default_factory=list)

    async def connect(self) -> Client:
        return Client(await self.raw())

    async def raw(self) -> trio.SocketStream:
        self.opened.append(await trio.open_tcp_stream("127.0.0.1", self.port))
        return self.opened[-1]


@asynccontextmanager
async def served(
    engine: FakeEngine | None = None,
    http: HttpSettings | None = None,
    settings: ServerSettings | None = None,
    running: bool = True,
    tracer: Tracer | None = None,
    **serve_options,
) -> AsyncIterator[Server]:
    """Serve `engine` on a free port of loopback; with `running` it makes steps by itself."""
    engine = engine or FakeEngine()
    app = Application(engine, http, tracer)
    sockets = listen(["127.0.0.1:0"])
    shutdown, done = trio.Event(), trio.Event()
    settings = settings or ServerSettings(graceful_timeout=1.0)

    async def run(task_status=trio.TASK_STATUS_IGNORED) -> None:
        options = {"pace": app.pace, **serve_options}
        with options["pace"].watching():  # as `Assembly` does
            await serve(app, sockets, settings, shutdown, task_status=task_status, **options)
        done.set()

    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(run)
        if running:
            nursery.start_soon(engine.run)
        port = int(addresses[0].rpartition(":")[2])
        server = Server(engine, port, shutdown, done, nursery, app)
        try:
            with trio.fail_after(120):
                yield server
        finally:
            for stream in server.opened:
                stream.socket.close()
        nursery.cancel_scope.cancel()
