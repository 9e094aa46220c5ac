"""What carries the bytes of a response: found behind an ASGI `send`.

Private attributes of hypercorn are touched in `Transport.behind` and in the two classes below it,
behind exact type checks; what is not recognised takes the plain path through `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from hypercorn.events import RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from tgi_trio.router.http.connection import SEND_TIMEOUT, Connection

# Bytes of one HTTP/2 stream that may wait for the client's flow-control window.
_H2_WINDOW = 1 << 16

_H2_CANCEL = 8  # error code of RST_STREAM


class Transport:
    """What stands behind an ASGI `send`. This base knows nothing of it: everything is plain."""

    send_timeout: float = SEND_TIMEOUT

    def cork(self, block: bytes) -> bool:
        """Hold the response, to leave in one write; False when `block` must go another way.

        `block` is further header lines for its head.
        """
        return False

    async def uncork(self) -> None:
        """Send what is held so far."""

    async def invite_body(self) -> None:
        """Tell a client that asks first (`Expect: 100-continue`) to send its body."""

    def on_leave(self, callback: Callable[[], None] | None) -> bool:
        """Have `callback` called, once and synchronously, when the client leaves.

        False when only the ASGI `receive` will tell.
        """
        return False

    def direct_socket(self) -> trio.socket.SocketType | None:
        """Return the socket that chunks of a response may be written to, if there is one."""
        return None

    async def flushed(self) -> bool:
        """Wait until little enough is unsent; False when the client does not read."""
        return True

    def cut(self) -> None:
        """Wake a send that cannot be cancelled, by giving its connection up. Synchronous."""

    async def abort(self) -> None:
        """Give the response up so that the client notices."""

    @staticmethod
    def behind(send: Any) -> Transport:
        """Return what carries the bytes of `send`, if it is one of our connections."""
        stream = getattr(send, "__self__", None)
        if type(stream) is not HTTPStream:
            return Transport()
        protocol = getattr(stream.send, "__self__", None)
        connection = getattr(getattr(protocol, "send", None), "__self__", None)
        if type(connection) is not Connection:
            return Transport()
        if type(protocol) is H11Protocol:
            return Http1(connection, stream)
        if type(protocol) is H2Protocol:
            return Http2(connection, protocol, stream)
        return Transport()


class Http1(Transport):
    """A response that has its connection for itself."""

    def __init__(self, connection: Connection, stream: HTTPStream) -> None:
        self._connection = connection
        self.send_timeout = connection.limits.send_timeout
        self._version = stream.scope["http_version"]

    def cork(self, block: bytes) -> bool:
        self._connection.cork(block)
        return True

    async def uncork(self) -> None:
        await self._connection.uncork()

    async def invite_body(self) -> None:
        await self._connection.invite_body()

    def on_leave(self, callback: Callable[[], None] | None) -> bool:
        self._connection.on_leave = callback
        return True

    def direct_socket(self) -> trio.socket.SocketType | None:
        # HTTP/1.0 has no chunks, and what goes through TLS is not for us to write.
        plain = self._connection.plain
        return plain.socket if plain is not None and self._version == "1.1" else None

    def cut(self) -> None:
        self._connection.abort()

    async def abort(self) -> None:
        self._connection.abort()


class Http2(Transport):
    """A response that shares its connection; hypercorn buffers it without bound."""

    def __init__(self, connection: Connection, protocol: H2Protocol, stream: HTTPStream) -> None:
        self.send_timeout = connection.limits.send_timeout
        self._protocol = protocol
        self._id = stream.stream_id

    async def flushed(self) -> bool:
        buffer = self._protocol.stream_buffers.get(self._id)
        if buffer is None or len(buffer.buffer) <= _H2_WINDOW:
            return True
        with trio.move_on_after(self.send_timeout):
            await buffer.drain()
            return True
        return False

    async def abort(self) -> None:
        h2 = self._protocol.connection
        if self._id in self._protocol.streams:
            h2.reset_stream(self._id, _H2_CANCEL)
            await self._protocol.send(RawData(h2.data_to_send()))
