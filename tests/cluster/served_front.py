"""A front on loopback, in the test's own process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import trio

from tests.cluster.fake_replica import SECRET
from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.front import Front, FrontSettings
from tgi_trio.cluster.front_metrics import FRONT_METRICS
from tgi_trio.cluster.members import MemberState
from tgi_trio.cluster.routing import Routing
from tgi_trio.router.http.wire.server import ServerSettings, listen, serve
from tgi_trio.router.telemetry.metrics import Metrics

WITH_SECRET = FrontSettings(secret=SECRET.encode())


@dataclass
class Answer:
    """What a client got; `cut`: the connection ended before it was whole."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    cut: bool = False

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class ServedFront:
    """What tests have of it."""

    front: Front
    port: int
    shutdown: trio.Event = field(default_factory=trio.Event)

    @property
    def fleet(self) -> Fleet:
        return self.front.fleet

    def count(self, name: str) -> float:
        return self.front.metrics.value(f"tgi_front_{name}")

    async def until(self, address: str, *states: MemberState | None) -> None:
        """Wait until a replica is in one of these states."""
        while True:
            member = self.fleet.members.find(address)
            if (None if member is None else member.state) in states:
                return
            await trio.sleep(0.002)

    async def open(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[trio.SocketStream, h11.Connection]:
        """Send a request."""
        return await send(self.port, method, path, body, **headers)

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Send a request and return its whole answer."""
        return await ask(self.port, method, path, body, **headers)


async def send(
    port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[trio.SocketStream, h11.Connection]:
    """Send a request to a port of loopback."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    connection = h11.Connection(h11.CLIENT)
    fields = [("host", "test"), ("content-length", str(len(body)))]
    fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
    request = h11.Request(method=method, target=path, headers=fields)
    parts = [request, *([h11.Data(body)] if body else []), h11.EndOfMessage()]
    await stream.send_all(b"".join(connection.send(part) or b"" for part in parts))
    return stream, connection


async def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    """Send a request to a port of loopback and return its whole answer."""
    stream, connection = await send(port, method, path, body, **headers)
    async with stream:
        answer = Answer(0, {})
        await receive(stream, connection, answer)
        return answer


async def receive(
    stream: trio.SocketStream, connection: h11.Connection, answer: Answer, until: bytes = b""
) -> None:
    """Add to an answer what comes of it, to its end or `until` its body has had these bytes."""
    while not (until and until in answer.body):
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(bytes(await stream.receive_some(65536)))
            except trio.BrokenResourceError:
                answer.cut = True
                return
        elif isinstance(event, h11.Response):
            answer.status = event.status_code
            answer.headers = {k.decode(): v.decode("latin-1") for k, v in event.headers}
        elif isinstance(event, h11.Data):
            answer.body += bytes(event.data)
        else:
            return


@asynccontextmanager
async def served_front(
    replicas: Sequence[str],
    settings: FrontSettings = WITH_SECRET,
    timeout: float = 600.0,
    up: bool = True,
) -> AsyncIterator[ServedFront]:
    """Serve a front until the block is left; `up`: not before it has heard all replicas.

    As long as nothing else is said of `timeout`, it asks them how they are once and no more.
    """
    metrics = Metrics(table=FRONT_METRICS)
    front = Front(
        Fleet(Routing(random.Random(1)), timeout, secret=settings.secret), metrics, settings
    )
    for name in replicas:
        front.fleet.name(name)
    listeners = listen(["127.0.0.1:0"])
    served = ServedFront(front, listeners[0].getsockname()[1])
    async with trio.open_nursery() as nursery:
        await nursery.start(front.fleet.run)
        await nursery.start(serve, front, listeners, ServerSettings(), served.shutdown)
        while up:
            await front.fleet.wait_polled()  # also what each of them serves
            up = any(each.state is not MemberState.UP for each in front.fleet.members)
            for each in front.fleet.replicas if up else ():
                each.poll_now.set()  # where this process stood still for a second it lost one
            await trio.sleep(0.002)
        try:
            yield served
        finally:
            nursery.cancel_scope.cancel()
