"""An HTTP/2 client that sees frames."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import h2.connection
import h2.events
import trio
from hyperframe.frame import Frame, GoAwayFrame

CERTIFICATE = str(Path(__file__).parent / "data" / "localhost.pem")


def tls(alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    context.check_hostname = False
    context.set_alpn_protocols([alpn])
    return context


class Http2:
    """A minimal HTTP/2 client."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.connection = h2.connection.H2Connection()
        self.connection.initiate_connection()
        self.body: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}  # those of them that were cut off, with their codes
        self.goodbyes: list[tuple[int, int]] = []  # GOAWAY: the last stream and the code of each
        self.pongs: list[bytes] = []
        self.left = False  # the server has closed the connection
        self._unread = bytearray()

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def post(self, path: str, body: bytes) -> int:
        id = self.connection.get_next_available_stream_id()
        self.connection.send_headers(
            id,
            [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "t"),
             ("content-type", "application/json"), ("content-length", str(len(body)))],
        )  # fmt: skip
        self.body[id] = b""
        while body:
            await self.pump(lambda: self.connection.local_flow_control_window(id) > 0)
            room = self.connection.local_flow_control_window(id)
            piece = body[: min(room, self.connection.max_outbound_frame_size)]
            body = body[len(piece) :]
            self.connection.send_data(id, piece, end_stream=not body)
            await self.flush()
        return id

    async def say_goodbye(self, code: int = 0, more: bytes = b"") -> None:
        """Send GOAWAY, and `more` in the same piece: h2's own would end this side of it."""
        await self.flush()
        await self.stream.send_all(GoAwayFrame(0, error_code=code).serialize() + more)

    def _apart(self, data: bytes) -> bytes:
        """Return whole frames that have come, GOAWAY kept from h2, which would read no more."""
        self._unread += data
        frames = b""
        while len(self._unread) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._unread)[:9])
            if len(self._unread) < 9 + length:
                break
            whole = bytes(self._unread[: 9 + length])
            del self._unread[: 9 + length]
            if isinstance(frame, GoAwayFrame):
                frame.parse_body(memoryview(whole)[9:])
                self.goodbyes.append((frame.last_stream_id, frame.error_code))
            else:
                frames += whole
        return frames

    async def pump(self, done: Callable[[], bool], acknowledge: bool = True) -> None:
        while not done():
            data = bytes(await self.stream.receive_some(65536))
            if not data:
                self.left = True
                assert done(), "the server has left"
                return
            for event in self.connection.receive_data(self._apart(data)):
                if isinstance(event, h2.events.DataReceived):
                    self.body[event.stream_id] += event.data
                    if acknowledge:
                        self.connection.acknowledge_received_data(
                            event.flow_controlled_length, event.stream_id
                        )
                elif isinstance(event, h2.events.PingAckReceived):
                    self.pongs.append(event.ping_data)
                elif isinstance(event, h2.events.ResponseReceived):
                    fields = {bytes(name): bytes(value) for name, value in event.headers}
                    self.statuses[event.stream_id] = int(fields[b":status"])
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    self.ended.add(event.stream_id)
                    if isinstance(event, h2.events.StreamReset):
                        self.reset[event.stream_id] = int(event.error_code or 0)
            await self.flush()

    async def pump_all(self) -> None:
        """Read until the server closes the connection."""
        await self.pump(lambda: self.left)

    async def pump_some(self, id: int) -> None:
        """Read until more of a body has come, or its end; the client's window stays as it is."""
        got = len(self.body[id])
        await self.pump(lambda: id in self.ended or len(self.body[id]) > got, acknowledge=False)
