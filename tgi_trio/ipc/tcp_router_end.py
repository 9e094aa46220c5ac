"""The router's end of a connection to a shard on another machine, for trio."""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

from tgi_trio.errors import PeerGone, RingFull
from tgi_trio.ipc.tcp import FrameSocket


class TcpRouterEnd:
    """A `CommandChannel` over TCP, as `router_end.RouterEnd` is one over shared memory.

    A closed connection is merely silent, as the ring of a dead shard is: deaths are noticed
    elsewhere (`Group.wait_for_death`).
    """

    def __init__(self, descriptor: int, describe_peer: Callable[[], str]) -> None:
        """Take over the descriptor of a connection."""
        self.describe_peer = describe_peer
        self._frames = FrameSocket(socket.socket(fileno=descriptor), describe_peer)
        self.release: Callable[[], None] = self._frames.release
        self._gone = False
        self._reading = trio.CancelScope()  # in which `wait` looks for frames, but not for room

    def try_receive(self) -> memoryview | None:
        """Return the next frame, valid until `release`; None if there is none.

        Raises CorruptRing for an impossible length.
        """
        try:
            return self._frames.try_receive()
        except PeerGone:
            self._gone = True
            return None

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Send a frame; returns False if the previous one is still unsent. Never blocks."""
        try:
            sent = not self._gone and self._frames.try_send(payload)
        except PeerGone:
            self._gone = True
            return False
        if not self._flushed():
            self._reading.cancel()  # otherwise the rest would stay here until a reply comes
        return sent

    async def send(self, payload: bytes | memoryview, timeout: float) -> None:
        """Send a frame. Raises RingFull if there is no room for it within `timeout` seconds."""
        with trio.move_on_after(timeout):
            while not self.try_send(payload):
                await self._wait_writable()
            await trio.lowlevel.checkpoint()
            return
        raise RingFull(
            self.describe_peer(), f"has taken no frame of {len(payload)} bytes in {timeout:g} s"
        )

    async def wait(self) -> None:
        """Return when a frame may have arrived, or may be sent; a checkpoint."""
        await trio.lowlevel.checkpoint()
        if not self._frames.empty():
            return
        if self._flushed():
            with trio.CancelScope() as self._reading:
                await self._wait_readable()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_readable, nursery.cancel_scope)
            nursery.start_soon(self._wait_writable, nursery.cancel_scope)

    def close(self) -> None:
        """Close the connection."""
        self._frames.close()

    def _flushed(self) -> bool:
        try:
            return self._gone or self._frames.flush()
        except PeerGone:
            self._gone = True
            return True

    async def _wait_readable(self, scope: trio.CancelScope | None = None) -> None:
        if self._gone:
            await trio.sleep_forever()
        await trio.lowlevel.wait_readable(self._frames.connection)
        if scope is not None:
            scope.cancel()

    async def _wait_writable(self, scope: trio.CancelScope | None = None) -> None:
        if self._gone:
            await trio.sleep_forever()
        await trio.lowlevel.wait_writable(self._frames.connection)
        if scope is not None:
            scope.cancel()
