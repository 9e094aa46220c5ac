"""Accepts connections from machines of the cluster, which must first prove that they know its
secret; nothing else that they send is read before that."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from tgi_trio.errors import PeerError
from tgi_trio.ipc.peering import Side
from tgi_trio.process.accepting import Acceptor
from tgi_trio.process.sockets import start_listening
from tgi_trio.router.shards.rank_link import GREETING_S, Message, RankLink, greet

log = logging.getLogger(__name__)

_UNKNOWN: Final = 32  # most connections at a time that are not authenticated yet

# Takes over a connection, given its first message; raises PeerError if it is not wanted.
Receive = Callable[[Message, RankLink], Awaitable[None]]


class PeerAcceptor:
    """Accepts connections, and passes on those that know the secret."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes, receive: Receive) -> None:
        """`listeners`: bound sockets; `receive`: takes over authenticated connections."""
        self._listeners = listeners
        self._secret = secret
        self._receive = receive
        self._unknown = trio.Semaphore(_UNKNOWN)
        self._acceptor = Acceptor()
        self._last_warning = ""  # not repeated: a refused peer may try again and again

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept connections until cancelled."""
        async with trio.open_nursery() as nursery:
            for listener in self._listeners:
                start_listening(listener, _UNKNOWN)
                own = trio.SocketListener(trio.socket.from_stdlib_socket(listener.dup()))
                nursery.start_soon(self._listen, own, nursery)
            task_status.started()

    async def _listen(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                await self._unknown.acquire()
                stream = await self._acceptor.accept(listener)
                try:
                    address = str(stream.socket.getpeername()[0])
                except OSError:  # gone already
                    self._unknown.release()
                    await trio.aclose_forcefully(stream)
                    continue
                nursery.start_soon(self._authenticate, stream, address)

    async def _authenticate(self, stream: trio.SocketStream, peer: str) -> None:
        """Authenticate a connection and pass it on, or close it."""
        link = RankLink(stream, peer)
        try:
            try:
                await greet(stream, self._secret, Side.CALLED, peer)
            finally:
                self._unknown.release()
            with trio.fail_after(GREETING_S):
                await self._receive(await link.receive(), link)
            self._last_warning = ""
        except (PeerError, trio.TooSlowError) as error:
            if str(error) != self._last_warning:
                log.warning("a caller is sent away: %s", error)
            self._last_warning = str(error)
            await trio.aclose_forcefully(stream)
