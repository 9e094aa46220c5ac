"""Sockets, connections and shutdown, in place of hypercorn's trio worker.

Hypercorn's accepts no other connection class, and its shutdown waits for ever for a client that
does not read. This server accepts on sockets that we bind ourselves, so that a port in use is an
error that names the flag, and every phase of its shutdown has a deadline.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tgi_trio.process.accepting import Acceptor, any_waits
from tgi_trio.process.sockets import address_text, bind, start_listening
from tgi_trio.router.http.wire.certificate import Certificate
from tgi_trio.router.http.wire.connection import Connection, ConnectionLimits
from tgi_trio.router.http.wire.headers import DateHeader
from tgi_trio.router.http.wire.http1 import LONGEST_HEAD
from tgi_trio.router.http.wire.http1_session import Http1Session
from tgi_trio.router.http.wire.http2 import Http2Server, Http2Session
from tgi_trio.router.http.wire.idle import IdleConnections
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.readiness import Readiness
from tgi_trio.router.http.wire.transport import App

log = logging.getLogger(__name__)

# Seconds after `shutdown` in which clients are let in that have connected before it: they wait in
# the kernel's queue, and would be reset with it.
LAST_CALL = 1.0

# Seconds after the grace period in which the last bytes of streams may still be sent.
FLUSH = 1.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings for listening, and timeouts."""

    graceful_timeout: float = 90.0  # seconds from `shutdown` until generations are ended
    # Seconds that a connection may be idle between two requests. Longer than in proxies (nginx 60,
    # Traefik 90, Caddy 120, Google's load balancers 600): the side that closes first may do so
    # while the other sends a request, which a proxy must not send again.
    keep_alive_timeout: float = 620.0
    backlog: int = 4096
    certfile: Path | str | None = None
    keyfile: Path | str | None = None
    longest_head: int = LONGEST_HEAD  # bytes; for HTTP/2 hypercorn has a limit of its own
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)

    def open_certificate(self) -> Certificate | None:
        """Read the certificate, if TLS is served; raises ConfigurationError."""
        return None if self.certfile is None else Certificate(self.certfile, self.keyfile)


def listen(addresses: Sequence[str], backlog: int = 4096) -> list[socket.socket]:
    """Bind and listen on each of `addresses`, in the form of `sockets.bind`.

    Raises ConfigurationError, naming the flag, if an address is not available.
    """
    listeners = bind(addresses)
    for listener in listeners:
        start_listening(listener, backlog)
    return listeners


async def serve(
    app: App,
    sockets: Sequence[socket.socket],
    settings: ServerSettings,
    shutdown: trio.Event,
    *,
    acceptor: Acceptor | None = None,
    pace: LoopPace | None = None,
    on_grace_end: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the ASGI `app` until `shutdown` is set and every response has ended.

    Reports its addresses through `task_status`. `acceptor` limits and counts clients, and is given
    a way to close idle ones for others. `pace` spreads what many of them do at a time. After
    `graceful_timeout`, `on_grace_end` may end what still runs; others are reset then. Raises
    ConfigurationError if the certificate cannot be used.
    """
    draining, pace = trio.Event(), pace or LoopPace()
    readiness = Readiness(pace)
    speak = _speaker(app, settings.longest_head)
    idle, acceptor = IdleConnections(), acceptor or Acceptor()
    acceptor.make_room = idle.close_oldest
    certificate = settings.open_certificate()
    live: set[Connection] = set()

    async def handle(tcp: trio.SocketStream) -> None:
        stream = _secured(tcp, certificate)
        connection = Connection(
            stream, settings.limits, settings.keep_alive_timeout, draining, idle, pace, readiness
        )
        live.add(connection)
        try:
            await connection.run(speak)
        except* Exception as group:  # an error of one connection must not end the server
            log.error("a connection failed", exc_info=group)
        finally:
            live.discard(connection)

    async with readiness.watching(), trio.open_nursery() as grace:
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                if certificate is not None:
                    accepting.start_soon(certificate.watch)
                for sock in sockets:
                    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
                    accepting.start_soon(acceptor.run, listener, handle, connections)
                task_status.started([_url(sock, certificate is not None) for sock in sockets])
                await shutdown.wait()
                await _let_in_the_last(acceptor, sockets)
                accepting.cancel_scope.cancel()
            draining.set()
            grace.start_soon(
                _end_of_grace, settings.graceful_timeout, on_grace_end, live, connections
            )
        grace.cancel_scope.cancel()


def _speaker(app: App, longest_head: int) -> Callable[[Connection], Awaitable[None]]:
    """Return what serves a connection by HTTP/1.1, then by HTTP/2 if its client turns to that."""
    date = DateHeader()
    http2 = Http2Server(log, date)

    async def speak(connection: Connection) -> None:
        first = b""
        if connection.protocol != "h2":
            first = await Http1Session(connection, app, date, longest_head).serve()
        if first or connection.protocol == "h2":
            await Http2Session(connection, app, http2).serve(first)

    return speak


async def _let_in_the_last(acceptor: Acceptor, sockets: Sequence[socket.socket]) -> None:
    """Return when nobody waits in the kernel's queues, at the latest after LAST_CALL."""
    with trio.move_on_after(LAST_CALL):
        while acceptor.open < acceptor.most and any_waits(sockets):
            await trio.lowlevel.checkpoint()


async def _end_of_grace(
    timeout: float,
    on_grace_end: Callable[[], None] | None,
    live: set[Connection],
    connections: trio.Nursery,
) -> None:
    await trio.sleep(timeout)
    if on_grace_end is not None:
        on_grace_end()
        await trio.sleep(FLUSH)
    log.warning("resetting %d connections that did not end in time", len(live))
    for connection in list(live):
        connection.abort()  # wakes a send that is shielded from cancellation
    connections.cancel_scope.cancel()


def _secured(
    tcp: trio.SocketStream, certificate: Certificate | None
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Return TLS over `tcp`; `tcp` itself without a certificate, or for a Unix socket."""
    if certificate is None or tcp.socket.family == socket.AF_UNIX:
        return tcp
    return trio.SSLStream(tcp, certificate.context, server_side=True, https_compatible=True)


def _url(sock: socket.socket, secure: bool) -> str:
    """Return the URL of the server that listens on `sock`."""
    address = address_text(sock)
    if sock.family == socket.AF_UNIX:
        return address
    return f"{'https' if secure else 'http'}://{address}"
