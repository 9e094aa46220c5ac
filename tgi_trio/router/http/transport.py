"""What carries the bytes of a response: found behind an ASGI `send`.

HTTP/1.1 is `http1.Exchange`, HTTP/2 is below. Private attributes of hypercorn are touched here
alone, behind exact type checks; what is not recognised takes the plain path through `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from hypercorn.events import RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream

SEND_TIMEOUT = 30.0  # seconds

# Bytes of one HTTP/2 stream that may wait for the client's flow-control window.
_H2_WINDOW = 1 << 16

_H2_CANCEL = 8  # error code of RST_STREAM


class Transport:
    """What stands behind an ASGI `send`. This base knows nothing of it: everything is plain."""

    send_timeout: float = SEND_TIMEOUT

    async def flush(self) -> None:
        """Send the head of the response, if it waits for the body."""

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
        if isinstance(stream, Transport):
            return stream
        if type(stream) is HTTPStream:
            protocol = getattr(stream.send, "__self__", None)
            if type(protocol) is H2Protocol:
                return Http2(protocol, stream)
        return Transport()


class Http2(Transport):
    """A response that shares its connection; hypercorn buffers it without bound."""

    def __init__(self, protocol: H2Protocol, stream: HTTPStream) -> None:
        connection = getattr(protocol.send, "__self__", None)
        limits = getattr(connection, "limits", None)
        self.send_timeout = getattr(limits, "send_timeout", SEND_TIMEOUT)
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
