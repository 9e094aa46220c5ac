"""Sockets, connections and shutdown: our own copy of hypercorn's trio worker, from public parts.

hypercorn's worker cannot be given another connection class, and waits for ever at shutdown for a
client that does not read. This one accepts on sockets that we bind, so that a port in use is an
error that names the flag, and every phase of its end has a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.handlers import format_date_time

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import repr_socket_addr

from tgi_trio.router.http.connection import Connection, ConnectionLimits
from tgi_trio.router.http.sockets import bind, tls_context

log = logging.getLogger(__name__)

# Seconds after the grace period in which streams that were just ended may still be flushed.
FLUSH = 1.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How we listen and for how long we wait."""

    graceful_timeout: float = 90.0  # seconds from `shutdown` until generations are ended
    keep_alive_timeout: float = 75.0  # seconds a connection may be idle or take to send a head
    backlog: int = 4096
    certfile: Path | str | None = None
    keyfile: Path | str | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


def listen(addresses: Sequence[str], backlog: int = 4096) -> list[socket.socket]:
    """Bind and listen on each of `addresses`, as `sockets.bind` reads them.

    Raises ConfigurationError, naming the flag, when an address cannot be had.
    """
    listeners = bind(addresses)
    for listener in listeners:
        listener.listen(backlog)
    return listeners


async def serve(
    app: Callable[..., Any],
    sockets: Sequence[socket.socket],
    settings: ServerSettings,
    shutdown: trio.Event,
    *,
    on_grace_end: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the ASGI `app` until `shutdown` is set and every response has ended.

    Reports the addresses it listens on through `task_status`. After `graceful_timeout`,
    `on_grace_end` may end what still runs; connections that do not end then are reset.
    Raises ConfigurationError when the certificate cannot be used.
    """
    config, context = _hypercorn_config(settings), WorkerContext(None)
    listeners, addresses = _listeners(sockets, settings)
    paths = [sock.getsockname() for sock in sockets if sock.family == socket.AF_UNIX]
    live: set[Connection] = set()

    async def handle(stream: Any) -> None:
        connection = Connection(ASGIWrapper(app), config, context, stream, settings.limits)
        live.add(connection)
        try:
            await connection.run()
        except* Exception as group:  # one connection's trouble never ends the server
            log.error("a connection failed", exc_info=group)
        finally:
            live.discard(connection)

    async with trio.open_nursery() as grace:
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, handle, listeners, handler_nursery=connections)
                )
                task_status.started(addresses)
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            for path in paths:
                os.unlink(path)
            await context.terminated.set()
            grace.start_soon(
                _end_of_grace, settings.graceful_timeout, on_grace_end, live, connections
            )
        grace.cancel_scope.cancel()


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
        connection.abort()  # wakes a send that is shielded against cancellation
    connections.cancel_scope.cancel()


class _Config(Config):
    """hypercorn's configuration, formatting the date once a second instead of once a response."""

    _second = 0
    _headers: tuple[tuple[bytes, bytes], ...] = ()

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """Return what every response carries."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._headers = ((b"date", format_date_time(second).encode()),)
        return list(self._headers)


def _hypercorn_config(settings: ServerSettings) -> Config:
    config = _Config()
    config.keep_alive_timeout = settings.keep_alive_timeout
    config.keep_alive_max_requests = 10**9
    config.accesslog = None  # hypercorn's copies the environment for every request
    config.errorlog = log
    config.ssl_handshake_timeout = 10
    return config


def _listeners(
    sockets: Sequence[socket.socket], settings: ServerSettings
) -> tuple[list[trio.abc.Listener[Any]], list[str]]:
    context = tls_context(settings.certfile, settings.keyfile)
    scheme = "https" if context is not None else "http"
    listeners: list[trio.abc.Listener[Any]] = []
    addresses = []
    for sock in sockets:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        address = repr_socket_addr(sock.family, sock.getsockname())
        if context is not None and sock.family != socket.AF_UNIX:
            listeners.append(trio.SSLListener(listener, context, https_compatible=True))
        else:
            listeners.append(listener)
        addresses.append(address if sock.family == socket.AF_UNIX else f"{scheme}://{address}")
    return listeners, addresses
