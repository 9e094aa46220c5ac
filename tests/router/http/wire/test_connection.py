"""One connection, without what is spoken on it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tgi_trio.router.http.wire.connection import Connection, ConnectionLimits
from tgi_trio.router.http.wire.idle import IdleConnections
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.readiness import Readiness

pytestmark = pytest.mark.trio


class EndlessMemory:
    """Always wants more of a body, and has no room yet."""

    wanted = 100

    async def ready(self) -> None:
        await trio.lowlevel.checkpoint()

    def room(self, most: int) -> list[memoryview]:
        return []

    async def fill(self, count: int) -> bool:
        raise AssertionError(count)


def accepted() -> tuple[Connection, trio.SocketStream]:
    """Return a connection and the client's end of it."""
    ours, theirs = trio.socket.socketpair()
    pace = LoopPace(trio.current_time)
    connection = Connection(
        trio.SocketStream(ours),
        ConnectionLimits(),
        5.0,
        trio.Event(),
        IdleConnections(),
        pace,
        Readiness(pace),
    )
    return connection, trio.SocketStream(theirs)


@pytest.mark.parametrize("memory", [None, EndlessMemory()])
async def test_a_reader_ends_with_a_connection_that_is_closed_beside_it(
    memory: EndlessMemory | None,
) -> None:
    for _ in range(2):  # trio takes a second one that waits for descriptor -1 for another task's
        connection, client = accepted()

        async def take(data: bytes, connection: Connection = connection) -> bool:
            connection.abort()
            return True

        async with client:
            await client.send_all(b"some")
            with trio.fail_after(5):
                await connection.read(take, memory)


async def test_a_connection_that_is_cancelled_is_closed() -> None:
    connection, client = accepted()

    async def speak(connection: Connection) -> None:
        await trio.sleep_forever()

    async with client, trio.open_nursery() as nursery:
        nursery.start_soon(connection.run, speak)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert connection.stream.socket.fileno() == -1
