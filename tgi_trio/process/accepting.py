"""Accepting connections where descriptors, or memory for sockets, may be short.

An idle connection is closed for who comes. Where there is none, who cannot be accepted waits in the
kernel's queue, and whoever is connected notices nothing. A shortage is said once, and so is its
end: connections that end let others in, so that it may begin anew many times a second.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio
from trio.lowlevel import ParkingLot

log = logging.getLogger(__name__)

_PAUSE: Final = 0.1  # seconds until somebody who could not be accepted is tried again
_CALM: Final = 5.0  # seconds without another failure after which a shortage is over
# What may be short, and what to do about it.
_SHORT: Final = {
    errno.EMFILE: "`ulimit -n` or LimitNOFILE= allows this process more",
    errno.ENFILE: "the sysctl fs.file-max allows this machine more",
    errno.ENOBUFS: "the machine has no memory for sockets left",
    errno.ENOMEM: "the machine has no memory for sockets left",
}


def any_waits(listeners: Sequence[socket.socket]) -> bool:
    """Return whether a client has connected to one of these sockets and is not accepted.

    At one that is closed, as a second signal has them, nobody waits.
    """
    waiting = select.poll()
    for listener in listeners:
        if listener.fileno() >= 0:
            waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


@dataclass(slots=True)
class Acceptor:
    """Lets clients in, at all sockets together no more than `most` at a time."""

    most: float = math.inf
    note: Callable[[], None] = lambda: None  # called when a shortage begins
    make_room: Callable[[], bool] = lambda: False  # has an idle connection closed, if there is one
    open: int = 0  # clients that are connected, of those that `run` has let in
    let_in: int = 0  # all that it has let in so far
    _over_at: float = math.inf  # trio clock; infinite: nothing is short
    _ended: ParkingLot = field(default_factory=ParkingLot)  # who waits for a connection's end

    async def run(
        self,
        listener: trio.SocketListener,
        serve: Callable[[trio.SocketStream], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        """Have `serve` called in `nursery` with each connection, until cancelled."""

        async def serve_counted(stream: trio.SocketStream) -> None:
            try:
                await serve(stream)
            finally:
                self.open -= 1
                self._ended.unpark_all()

        async with listener:
            while True:
                stream = await self.accept(listener)
                self.open += 1
                self.let_in += 1
                nursery.start_soon(serve_counted, stream)

    async def accept(self, listener: trio.SocketListener) -> trio.SocketStream:
        """Wait for a connection, however long nothing can be accepted. Raises OSError otherwise."""
        while True:
            try:
                with trio.CancelScope(deadline=self._over_at):
                    # First, since a process without descriptors is told so whether or not anybody
                    # wants to be let in.
                    await trio.lowlevel.wait_readable(listener.socket)
                    if self.open >= self.most:
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    return await listener.accept()
                self._end_shortage()
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                if not self.make_room():
                    self._note_shortage(error.errno)
                with trio.move_on_after(_PAUSE):
                    await self._ended.park()

    def _note_shortage(self, number: int) -> None:
        if self._over_at == math.inf:
            self.note()
            log.warning(
                "no connection can be accepted beside %d: %s; clients wait until one ends; %s",
                self.open,
                os.strerror(number),
                _SHORT[number],
            )
        self._over_at = trio.current_time() + _CALM

    def _end_shortage(self) -> None:
        if self._over_at <= trio.current_time():
            self._over_at = math.inf
            log.info("connections are accepted again; %d are open", self.open)
