"""Reads streams' sockets without a turn of trio's event loop.

A token arrives every few milliseconds, and the front only reads and writes it. A turn of trio's
loop with a task to wake costs more than that, above all since the CPU's caches have gone cold since
the last token. So while streams are running, `Pump` does the waiting: called by trio just before it
would wait for I/O, it polls an epoll set of the streams' sockets, with trio's own epoll set nested
in it. Data of a stream is handled on the spot. Trio gets its turn as soon as there is anything for
it: one of its sockets is ready, a deadline is due, or a task was woken.

While streams are running, `trio.testing.wait_all_tasks_blocked` may not return.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import trio

_AT_ONCE: Final = 64  # sockets that one poll returns at most


class Pump(trio.abc.Instrument):
    """Handles streams' data between two turns of trio's loop."""

    def __init__(self, trio_epoll: select.epoll, runnable: deque[Any]) -> None:
        """`trio_epoll`: trio's own epoll set; `runnable`: trio's queue of runnable tasks."""
        self._trio_epoll = trio_epoll.fileno()
        self._runnable = runnable
        self._token = trio.lowlevel.current_trio_token()
        self._set = select.epoll()
        self._set.register(self._trio_epoll, select.EPOLLIN)
        self._drains: dict[int, _Drain] = {}  # by file descriptor

    async def drain(self, sock: socket.socket, take: Callable[[], bool]) -> None:
        """Call `take` whenever `sock` is readable, until it returns False. It must not block.

        Raises what `take` raises, and ClosedResourceError if the socket is closed meanwhile
        (`notify_closing`).
        """
        number, drain = sock.fileno(), _Drain(take)
        self._add(number, drain)
        try:
            await drain.ended.wait()
        finally:
            self._remove(number, drain)
        if drain.error is not None:
            raise drain.error

    def notify_closing(self, sock: socket.socket) -> None:
        """End the drain, if any, of a socket that is about to be closed."""
        drain = self._drains.get(sock.fileno())
        if drain is not None:
            drain.error = trio.ClosedResourceError("the socket was closed here")
            self._end(sock.fileno(), drain)

    def _add(self, number: int, drain: _Drain) -> None:
        if number < 0:
            raise trio.ClosedResourceError("the socket was closed here")
        self._set.register(number, select.EPOLLIN)
        if not self._drains:
            trio.lowlevel.add_instrument(self)
        self._drains[number] = drain

    def _remove(self, number: int, drain: _Drain) -> None:
        if self._drains.get(number) is not drain:
            return  # it has ended, and the descriptor may belong to another socket by now
        del self._drains[number]
        self._set.unregister(number)
        if not self._drains:
            trio.lowlevel.remove_instrument(self)

    def _end(self, number: int, drain: _Drain) -> None:
        self._remove(number, drain)
        drain.ended.set()

    def before_io_wait(self, timeout: float) -> None:
        """Wait for streams and for trio, at most `timeout` seconds. Called by trio (Instrument)."""
        until = time.monotonic() + timeout
        left = timeout
        while True:
            events = self._set.poll(left, _AT_ONCE)
            trio_ready = False
            for number, _ in events:
                if number == self._trio_epoll:
                    trio_ready = True
                else:
                    self._take(number)
            if trio_ready or timeout <= 0:
                return  # trio does not wait
            left = until - time.monotonic()
            if self._runnable or left <= 0:
                break
        # Without this trio would now wait for `timeout` again: it writes to trio's wake-up socket.
        self._token.run_sync_soon(_nothing, idempotent=True)

    def _take(self, number: int) -> None:
        drain = self._drains.get(number)
        if drain is None:
            return
        try:
            if drain.take():
                return
        except Exception as error:  # `drain` raises it
            drain.error = error
        self._end(number, drain)


class _Drain:
    """One socket that is read."""

    __slots__ = ("ended", "error", "take")

    def __init__(self, take: Callable[[], bool]) -> None:
        self.take = take
        self.ended = trio.Event()
        self.error: Exception | None = None


def _nothing() -> None:
    """Do nothing, in a turn of trio's loop."""


_PUMP: Final = trio.lowlevel.RunVar[Pump | None]("pump")


def current_pump() -> Pump | None:
    """Return the pump of this run of trio; None if trio's internals are not as expected."""
    try:
        return _PUMP.get()
    except LookupError:
        pump = _make_pump()
        _PUMP.set(pump)
        return pump


def _make_pump() -> Pump | None:
    runner = getattr(trio.lowlevel.current_task(), "_runner", None)
    runnable = getattr(runner, "runq", None)
    trio_epoll = getattr(getattr(runner, "io_manager", None), "_epoll", None)
    if type(runnable) is not deque or type(trio_epoll) is not select.epoll:
        return None
    return Pump(trio_epoll, runnable)
