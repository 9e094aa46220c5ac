"""HTTP/2 by hypercorn; no other file uses it.

Its H2Protocol is driven as by its own TCPServer, except for what `Protocol` overrides. Non-public
attributes of its streams are used only after exact type checks; an unrecognised stream is served as
any ASGI server would.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, RequestReceived, StreamReset
from h2.events import Event as Happening
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hyperframe.frame import Frame, GoAwayFrame

from tgi_trio.router.http.wire.connection import Connection
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.transport import EXTENSION, App, AsgiTransport, Receive, Send

# Most bytes of one stream that may wait for the client's flow-control window.
_WINDOW = 1 << 16

# Most bytes of frames that are read in one turn of the loop. The smallest frames far more than
# their bytes cost to receive: a client that sends nothing else would hold up everybody.
_TURN = 1 << 12


class Http2Server:
    """What all HTTP/2 connections of a server share."""

    def __init__(self, log: logging.Logger, common: Callable[[], Header]) -> None:
        """`common` returns a header for every answer."""
        self.config = _Config(common)
        self.config.keep_alive_max_requests = 10**9
        self.config.accesslog = None  # hypercorn's copies the environment for every request
        self.config.errorlog = log
        self.context = WorkerContext(None)


class Http2Session:
    """One connection whose client speaks HTTP/2."""

    def __init__(self, connection: Connection, app: App, server: Http2Server) -> None:
        self._connection = connection
        self._app = app
        self._server = server
        self._protocol: Protocol | None = None

    async def serve(self, first: bytes = b"") -> None:
        """Serve the connection until it ends. `first`: bytes received already."""
        connection = self._connection
        client, server = connection.addresses
        async with TaskGroup() as tasks:
            protocol = self._protocol = Protocol(
                connection.breathe,
                self._call,
                self._server.config,
                self._server.context,
                tasks,
                ConnectionState({}),
                connection.plain is None,
                client,
                server,
                self._send,
            )
            connection.on_end(self._on_end, self._hang_up)
            await protocol.initiate()
            if first:
                await self._take(first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_when_draining, protocol)
                await connection.read(self._take)
                nursery.cancel_scope.cancel()
            await self._on_end()
        self._protocol = None  # they refer to each other: no garbage may be left

    async def _leave_when_draining(self, protocol: Protocol) -> None:
        await self._connection.draining.wait()
        await protocol.leave()

    async def _hang_up(self) -> None:
        """Close the connection, which is idle."""
        if self._protocol is not None:
            await self._protocol.leave()
        await self._send(Closed())

    async def _take(self, data: bytes) -> bool:
        for start in range(0, len(data), _TURN):
            if start:
                await trio.lowlevel.checkpoint()
            await self._handle(RawData(data[start : start + _TURN]))
            if self._protocol is not None and self._protocol.closed:
                return False
        return True

    async def _on_end(self) -> None:
        await self._handle(Closed())
        if self._protocol is not None:
            await self._protocol.drop_all_unsent()

    async def _handle(self, event: Event) -> None:
        if self._protocol is not None:
            await self._protocol.handle(event)

    async def _send(self, event: Event) -> None:
        """Called by hypercorn's protocol with bytes to send, or with a change of its state."""
        if isinstance(event, RawData):
            await self._connection.send(event.data)
        elif isinstance(event, Closed):
            await self._connection.close(linger=True)
            await self._on_end()
        elif isinstance(event, Updated):
            watch = self._connection.idle_watch
            if event.idle:
                watch.idle()
            else:
                watch.busy()

    async def _call(
        self, scope: Any, receive: Any, send: Any, sync_spawn: object, call_soon: object
    ) -> None:
        """Called by hypercorn with each request, in a task of its own."""
        async with trio.open_nursery() as nursery:
            stream = getattr(send, "__self__", None)
            breathe = self._connection.breathe
            transport = AsgiTransport(nursery, receive, send, breathe)
            if type(stream) is HTTPStream and self._protocol is not None:
                transport = Http2Transport(nursery, receive, send, breathe, self._protocol, stream)
                transport.send_timeout = self._connection.limits.send_timeout
            scope["extensions"][EXTENSION] = transport
            try:
                await self._app(scope, transport.receive, transport.send)
            finally:  # hypercorn's stream refers to its scope: no garbage may be left
                del scope["extensions"][EXTENSION]
            nursery.cancel_scope.cancel()


class Http2Transport(AsgiTransport):
    """A response that shares its connection with others; hypercorn buffers it without limit."""

    def __init__(
        self,
        nursery: trio.Nursery,
        receive: Receive,
        send: Send,
        breathe: Callable[[], Awaitable[None]],
        protocol: Protocol,
        stream: HTTPStream,
    ) -> None:
        super().__init__(nursery, receive, send, breathe)
        self._protocol = protocol
        self._id = stream.stream_id

    async def send(self, message: Any) -> None:
        """Send a message of the response. The last one may take as long as the client reads."""
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await self._send(message)
            return
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await self._until_stalled()
                await self.abort()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self._send(message)
            nursery.cancel_scope.cancel()

    async def _until_stalled(self) -> None:
        """Return when the client has read nothing for `send_timeout`."""
        unsent, before = self._unsent(), -1
        while unsent != before:
            await trio.sleep(self.send_timeout)
            unsent, before = self._unsent(), unsent

    def _unsent(self) -> int:
        """Return how many bytes wait for the client."""
        buffer = self._protocol.stream_buffers.get(self._id)
        return 0 if buffer is None else len(buffer.buffer)

    async def wait_flushed(self) -> bool:
        buffer, unsent = self._protocol.stream_buffers.get(self._id), self._unsent()
        while buffer is not None and unsent > _WINDOW:
            with trio.move_on_after(self.send_timeout):
                await buffer.drain()
                return True
            before, unsent = unsent, self._unsent()
            if unsent == before:
                return False
        return True

    async def abort(self) -> None:
        h2 = self._protocol.connection
        if self._id in self._protocol.streams:
            h2.reset_stream(self._id, ErrorCodes.CANCEL)
            await self._protocol.send(RawData(h2.data_to_send()))
            await self._protocol.drop_unsent(self._id)


class PatientConnection(H2Connection):
    """h2's connection, on which streams may end after the client's GOAWAY (RFC 9113, 6.8).

    The original takes it for the end: it forgets what is unsent, and refuses all that follows.
    """

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Happening]]:
        happening = ConnectionTerminated()
        happening.error_code = frame.error_code
        return [], [happening]


class Protocol(H2Protocol):
    """hypercorn's protocol, changed so that one request cannot end the connection for others.

    The original raises KeyError for a body whose request has been answered. It also keeps streams
    that were reset while nothing waited to be sent, until it has a thousand and raises, and has a
    request wait for a client that has left. A GOAWAY cuts its streams, and when a server drains it
    sends none before the last answer, and then waits for the client to close.
    """

    def __init__(self, breathe: Callable[[], Awaitable[None]], *given: Any) -> None:
        """`breathe` waits before a request is taken or given up, as `LoopPace` does."""
        super().__init__(*given)
        self._breathe = breathe
        theirs, self.connection = self.connection, PatientConnection(self.connection.config)
        self.connection.local_settings = theirs.local_settings
        self._leaving = False
        self._last = 0  # the last request that was taken

    async def leave(self) -> None:
        """Take no more requests, and close when those that run have been answered. Idempotent."""
        if not self._leaving:
            self._leaving = True
            await self.send(RawData(GoAwayFrame(0, last_stream_id=self._last).serialize()))
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._leaving and not (self.closed or self.streams or self.stream_buffers):
            await self.send(Closed())

    async def _close_stream(self, stream_id: int) -> None:
        await super()._close_stream(stream_id)
        await self._close_if_done()

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        await self._close_if_done()

    async def drop_unsent(self, stream_id: int) -> None:
        """Have the sending task forget a stream that was reset, which it would fail to end."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None:
            await buffer.close()
            await self._window_updated(stream_id)

    async def drop_all_unsent(self) -> None:
        """Have nobody wait any longer for the client to read: it has left."""
        for buffer in list(self.stream_buffers.values()):
            await buffer.close()

    async def _handle_events(self, events: list[Happening]) -> None:
        # One by one, as a stream may end while an earlier event is handled.
        for event in events:
            if isinstance(event, RequestReceived | StreamReset):
                await self._breathe()
            if self.closed:
                return
            if isinstance(event, RequestReceived):
                await self._take_request(event)
            elif isinstance(event, ConnectionTerminated) and not event.error_code:
                await self.leave()
            elif isinstance(event, DataReceived) and event.stream_id not in self.streams:
                # The rest of a body whose request has been answered is dropped, but acknowledged:
                # others need the connection's window, and the client that of the stream, as many
                # read the answer only after sending everything.
                self.connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            else:
                await super()._handle_events([event])
            if isinstance(event, StreamReset):
                await self.drop_unsent(event.stream_id)
        await self._flush()

    async def _take_request(self, request: RequestReceived) -> None:
        if self._leaving:
            self.connection.reset_stream(request.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last = request.stream_id
        if (b":method", b"CONNECT") in request.headers:
            self._decline(request.stream_id)
        else:
            await super()._handle_events([request])

    def _decline(self, stream_id: int) -> None:
        """Refuse a tunnel or a WebSocket (RFC 8441), which no route supports."""
        headers = [(b":status", b"501"), *self.config.response_headers("h2")]
        self.connection.send_headers(stream_id, headers, end_stream=True)


class _Config(Config):
    """hypercorn's configuration, with our header in place of its own."""

    def __init__(self, common: Callable[[], Header]) -> None:
        super().__init__()
        self._common = common

    def response_headers(self, protocol: str) -> list[Header]:
        """Return the headers of every response."""
        return [self._common()]
