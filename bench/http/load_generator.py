"""A load generator on one core: epoll, no parsing beyond what is counted.

The age of an event is the time from its step to its arrival at the client's socket, as the kernel
stamps it. The moment at which this program reads it would add its own queue to it: at 50 thousand
events a second that is most of what it would see.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_RECEIVE = 1 << 16  # below what malloc maps and unmaps at every call

# Where arrivals are stamped, nothing depends on when they are read. A client that waited for each
# would have the server wake it, event by event, which clients on other machines do not ask of it.
_NAP = 0.001  # seconds

_SO_TIMESTAMPNS = 35  # of Linux; the socket module has no name for it
_STAMP = struct.Struct("@ll")  # timespec


@dataclass
class Load:
    """What a client saw in its measured time."""

    seconds: float = 0.0
    events: int = 0
    requests: int = 0
    ages: list[float] = field(default_factory=list)  # seconds from step to the client's socket
    times: list[float] = field(default_factory=list)  # seconds from request to its answer's end
    errors: int = 0


class _Connection:
    __slots__ = ("body", "buffer", "length", "received", "sent_at", "sock", "stamped")

    def __init__(self, port: int, stamped: bool) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.stamped = stamped
        if stamped:
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.reset()

    def receive(self) -> tuple[bytes, float]:
        """Return what has arrived, and when its end did (`time.time`; 0 when it is not stamped).

        Raises RuntimeError when the server has closed the connection.
        """
        notes: list[Any] = []
        try:
            if not self.stamped:
                data = self.sock.recv(_RECEIVE)
            else:
                data, notes, _, _ = self.sock.recvmsg(_RECEIVE, 64)
        except BlockingIOError:
            return b"", 0.0
        if not data:
            raise RuntimeError("the server closed a connection")
        for level, kind, note in notes:
            if self.body and (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = _STAMP.unpack(note)
                return data, seconds + nanoseconds / 1e9
        return data, 0.0

    def reset(self) -> None:
        self.body = False  # the head has been read
        self.buffer = b""
        self.length = -1  # of the body; -1: chunked
        self.received = 0
        self.sent_at = 0.0


def request(path: str, tokens: int) -> bytes:
    """Return a request for `tokens` tokens."""
    body = (
        b'{"inputs":"What is the capital of France? Please answer in one word.","parameters":'
        b'{"max_new_tokens":%d,"temperature":0.7,"top_p":0.95,"seed":42}}' % tokens
    )
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )


def run(
    port: int,
    connections: int,
    path: str,
    tokens: int,
    warm: float,
    seconds: float,
    started: Callable[[], None] = lambda: None,
    ages: bool = False,
    stagger: bool = False,
) -> Load:
    """Keep `connections` requests under way; measure for `seconds` after `warm` seconds.

    `started` is called when measuring begins. With `ages` the tokens' texts are times. With
    `stagger` the first answers differ in length, so that later ones do not end all at once.
    """
    head = request(path, tokens)
    poll = select.epoll()
    by_number: dict[int, _Connection] = {}
    load = Load()
    try:
        for i in range(1, connections + 1):
            connection = _Connection(port, ages)
            by_number[connection.sock.fileno()] = connection
            poll.register(connection.sock, select.EPOLLIN)
            connection.sent_at = time.perf_counter()
            first = max(1, tokens * i // connections) if stagger else tokens
            connection.sock.send(request(path, first))
        begin = time.perf_counter() + warm
        end, measuring, since = begin + seconds, False, begin
        while (now := time.perf_counter()) < end:
            if not measuring and now >= begin:
                measuring, since = True, now
                load = Load()
                started()
            if ages:
                time.sleep(_NAP)
            for number, _ in poll.poll(0.02):
                connection = by_number[number]
                data, arrived = connection.receive()
                if arrived and measuring:
                    load.ages.append(arrived - _last_stamp(data))
                if data and _is_answered(connection, data, load):
                    now = time.perf_counter()
                    load.requests += 1
                    load.times.append(now - connection.sent_at)
                    connection.reset()
                    connection.sent_at = now
                    connection.sock.send(head)
        load.seconds = time.perf_counter() - since
    finally:
        poll.close()
        for connection in by_number.values():
            connection.sock.close()
    return load


def _last_stamp(data: bytes) -> float:
    """Return the time that the last token of `data` has for a text."""
    start = data.rfind(b'"text":"') + 8
    return float(data[start : data.find(b'"', start)])


def _is_answered(connection: _Connection, data: bytes, load: Load) -> bool:
    """Take what arrived on a connection; return whether its answer is whole now."""
    if not connection.body:
        connection.buffer += data
        found = connection.buffer.find(b"\r\n\r\n")
        if found < 0:
            return False
        first, data = connection.buffer[:found].lower(), connection.buffer[found + 4 :]
        connection.body = True
        if not first.startswith(b"http/1.1 200"):
            load.errors += 1
        _, mark, rest = first.partition(b"content-length: ")
        connection.length = int(rest.split(b"\r\n", 1)[0]) if mark else -1
        if not data:
            return False
    connection.received += len(data)
    if connection.length >= 0:
        return connection.received >= connection.length
    load.events += data.count(b"}\n\n")
    return data.endswith(b"0\r\n\r\n")


def stuck(port: int, count: int, tokens: int) -> list[socket.socket]:
    """Open `count` HTTP/1.1 streams that are never read."""
    sockets = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.send(request("/generate_stream", tokens))
        sockets.append(sock)
    return sockets


def stuck_h2(port: int, count: int, tokens: int) -> list[socket.socket]:
    """Open `count` HTTP/2 connections with one stream each that is never read."""
    import h2.connection

    body = request("/generate_stream", tokens).partition(b"\r\n\r\n")[2]
    sockets = []
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        connection = h2.connection.H2Connection()
        connection.initiate_connection()
        connection.send_headers(
            1,
            [(":method", "POST"), (":path", "/generate_stream"), (":scheme", "http"),
             (":authority", "bench"), ("content-type", "application/json"),
             ("content-length", str(len(body)))],
        )  # fmt: skip
        connection.send_data(1, body, end_stream=True)
        sock.sendall(connection.data_to_send())
        sockets.append(sock)
    return sockets
