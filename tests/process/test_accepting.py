"""Connections are accepted while there are descriptors for them, and wait otherwise."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
import trio
import trio.testing

from tgi_trio.process.accepting import _CALM, _PAUSE, Acceptor, any_waits

pytestmark = pytest.mark.trio


@pytest.fixture
async def listener() -> AsyncIterator[trio.SocketListener]:
    (found,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with found:
        yield found


def call(listener: trio.SocketListener) -> socket.socket:
    """Connect, whether or not anybody accepts it."""
    return socket.create_connection(listener.socket.getsockname())


async def jump(clock: trio.testing.MockClock, seconds: float) -> None:
    await trio.testing.wait_all_tasks_blocked(0.02)
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked(0.02)


async def until(done: Callable[[], bool]) -> None:
    """Wait, by the clock of the machine: a connection takes the kernel its time."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        await trio.testing.wait_all_tasks_blocked(0.02)


class Door:
    """What serves: it keeps connections until they are told to end."""

    def __init__(self) -> None:
        self.inside: list[trio.Event] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            self.inside.append(ended := trio.Event())
            await ended.wait()


async def test_who_is_beyond_the_limit_waits_until_another_has_left(
    listener: trio.SocketListener,
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes: list[int] = []
    acceptor, door = Acceptor(2, note=lambda: notes.append(1)), Door()
    caplog.set_level(logging.INFO)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acceptor.run, listener, door.serve, nursery)
        clients = [call(listener) for _ in range(4)]
        await until(lambda: len(door.inside) == 2 and bool(notes))
        assert acceptor.open == 2
        for _ in range(5):
            await jump(mock_clock, _PAUSE)
        door.inside[0].set()
        await jump(mock_clock, _PAUSE)
        await until(lambda: len(door.inside) == 3)
        assert acceptor.open == 2, "one has left, and one has come"
        assert acceptor.let_in == 3
        door.inside[1].set()
        await jump(mock_clock, _PAUSE)
        await until(lambda: len(door.inside) == 4)
        (told,) = caplog.messages
        assert "beside 2" in told and "ulimit -n" in told and "Too many open files" in told
        await jump(mock_clock, _CALM)
        assert caplog.messages[1:] == ["connections are accepted again; 2 are open"]
        clients.append(call(listener))
        await until(lambda: len(notes) == 2)
        assert len(caplog.messages) == 3, "it is said again when it is so again"
        nursery.cancel_scope.cancel()
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOBUFS, "memory")],
)
async def test_what_the_kernel_does_not_have_is_waited_for(
    listener: trio.SocketListener,
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    advice: str,
) -> None:
    accept, short = listener.accept, True

    async def accept_unless_short() -> trio.SocketStream:
        if short:
            raise OSError(number, os.strerror(number))
        return await accept()

    monkeypatch.setattr(listener, "accept", accept_unless_short)
    acceptor, door = Acceptor(), Door()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(acceptor.run, listener, door.serve, nursery)
        await jump(mock_clock, 1)
        assert not caplog.messages, "nobody wants to be let in"
        client = call(listener)
        await until(lambda: bool(caplog.messages))
        for _ in range(3):
            await jump(mock_clock, _PAUSE)
        assert len(caplog.messages) == 1 and advice in caplog.text and not door.inside
        short = False
        await jump(mock_clock, _PAUSE)
        await until(lambda: len(door.inside) == 1)
        nursery.cancel_scope.cancel()
    client.close()


async def test_other_errors_are_raised(
    listener: trio.SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def accept() -> trio.SocketStream:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(listener, "accept", accept)
    client = call(listener)
    with pytest.raises(OSError, match="no"):
        await Acceptor().accept(listener)
    client.close()


async def test_nobody_waits_at_a_closed_socket() -> None:
    """A second signal closes them while the first one's last look is under way."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        one.close()
        assert not any_waits([one, two])
        with socket.create_connection(two.getsockname()):
            await until(lambda: any_waits([one, two]))
            two.close()
            assert not any_waits([one, two])
