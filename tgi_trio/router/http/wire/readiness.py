"""Wakes who waits for a client to send something, or to leave: few in a turn of the loop.

Trio wakes all whose sockets can be read in one turn: a thousand clients that leave together take it
20 ms, though each of their tasks only goes to sleep again until a turn is young (`pace.py`). So
where more than a few wait, the others do so at an epoll of their own, which gives out as many as a
turn has time for. The kernel keeps the rest, in the order in which they became ready.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.transport import wait_readable

# Most that wait by trio itself: they need no other task, which would take 20 us each time.
_BY_TRIO: Final = 64
_WOKEN: Final = 16  # most of the others that are woken in a turn: 10 us each

_READABLE: Final = select.EPOLLIN | select.EPOLLONESHOT


class Readiness:
    """Who waits until a socket can be read."""

    def __init__(self, pace: LoopPace, by_trio: int = _BY_TRIO) -> None:
        """`by_trio`: how many wait by trio itself. Others can wait only within `watching`."""
        self._pace = pace
        self._by_trio = by_trio  # how many more may
        self._epoll: select.epoll | None = None
        self._waiting: dict[int, trio.lowlevel.Task] = {}  # by descriptor

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Wake who waits within the block."""
        with contextlib.closing(select.epoll()) as self._epoll:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, self._epoll)
                    yield
                    nursery.cancel_scope.cancel()
            finally:
                self._epoll = None

    async def _watch(self, epoll: select.epoll) -> None:
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            await self._pace.breathe()
            for descriptor, _ in epoll.poll(0, _WOKEN):
                if (task := self._waiting.pop(descriptor, None)) is not None:
                    trio.lowlevel.reschedule(task)

    async def wait(self, sock: socket.socket) -> None:
        """Wait until a socket has bytes, or its end. A checkpoint.

        Raises trio.ClosedResourceError if it is closed, and trio.BusyResourceError if another task
        waits for it.
        """
        if self._by_trio <= 0 and self._epoll is not None:
            await self._wait(sock.fileno(), self._epoll)
            if sock.fileno() < 0:
                raise trio.ClosedResourceError("the socket was closed here")
            return
        self._by_trio -= 1
        try:
            await wait_readable(sock)
        finally:
            self._by_trio += 1

    async def _wait(self, descriptor: int, epoll: select.epoll) -> None:
        if descriptor < 0:
            raise trio.ClosedResourceError("the socket was closed here")
        if descriptor in self._waiting:
            raise trio.BusyResourceError("another task waits for the socket")
        try:
            epoll.modify(descriptor, _READABLE)
        except FileNotFoundError:
            epoll.register(descriptor, _READABLE)
        self._waiting[descriptor] = trio.lowlevel.current_task()

        def abort(raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
            # The kernel may still report it, once: then nobody is there to be woken.
            del self._waiting[descriptor]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def forget(self, sock: socket.socket) -> None:
        """Wake who waits for a socket, which the caller closes before anything else runs.

        Those who wait by trio are woken by trio's `close`.
        """
        task = self._waiting.pop(sock.fileno(), None)
        if task is not None:
            trio.lowlevel.reschedule(task)
