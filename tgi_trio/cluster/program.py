"""Runs a front: starts its parts, serves, and drains on a signal."""

from __future__ import annotations

import logging
import random
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from tgi_trio.cluster.feed import Address, Feed
from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.front import Front, FrontSettings
from tgi_trio.cluster.front_metrics import FRONT_METRICS
from tgi_trio.cluster.peers import follow_peers
from tgi_trio.cluster.replicas_file import read_replicas, watch_replicas
from tgi_trio.cluster.routing import HEADS, Routing
from tgi_trio.logs import say, say_record
from tgi_trio.process.descriptors import max_connections
from tgi_trio.process.signals import received_signals
from tgi_trio.process.sockets import start_listening
from tgi_trio.router.http.key_watch import watch_keys
from tgi_trio.router.http.wire.server import ServerSettings, serve
from tgi_trio.router.telemetry.connections import counted_acceptor
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.settings.keys import Keys

log = logging.getLogger(__name__)

BACKLOG: Final = 4096  # connections that may wait to be accepted
FIRST_ANSWERS: Final = 1.0  # seconds to wait for replicas' first health checks before listening
GRACE: Final = 1.0  # seconds; short, since running requests have been drained before


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """A front program's settings, as flags give them."""

    front: FrontSettings
    replicas: tuple[str, ...]  # addresses that are always served
    replicas_file: Path | None  # further ones, which may change
    replica_timeout: float  # seconds
    graceful_timeout: float  # seconds that running requests have once new ones are refused
    shutdown_delay: float = 0.0  # seconds from the first signal until new requests are refused
    keys: Keys = field(default_factory=Keys)  # the source of `front.api_keys`
    certfile: Path | None = None
    keyfile: Path | None = None
    json_output: bool = False
    peers: tuple[Address, ...] = ()  # names and ports of other fronts
    known_prefixes: int = HEADS


class FrontProgram:
    """One run of a front."""

    def __init__(
        self,
        settings: ProgramSettings,
        sockets: Sequence[socket.socket],
        feed: socket.socket | None = None,
    ) -> None:
        """`sockets`: bound, not listening yet; `feed`: the bound UDP socket, if there are peers.

        Raises ConfigurationError if the file of replicas cannot be read.
        """
        self._settings = settings
        self._sockets = sockets
        self._feed = feed
        self._stopping = trio.Event()  # the first signal: drain
        path = settings.replicas_file
        self._named = [] if path is None else read_replicas(path)

    async def run(self, early: Sequence[int] = ()) -> None:
        """Serve until a signal: the first one drains, the second one stops at once.

        `early`: signals that arrived before this method could receive any.
        """
        with trio.open_signal_receiver(*received_signals()) as signals:
            if early:
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey_signals, signals, nursery.cancel_scope)
                await self._serve(nursery)
                nursery.cancel_scope.cancel()

    async def _obey_signals(
        self, signals: AsyncIterator[int], everything: trio.CancelScope
    ) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if self._stopping.is_set():
                log.warning("%s: stopping at once", name)
                everything.cancel()
                return
            log.warning("%s: draining; a second signal stops at once", name)
            self._stopping.set()

    async def _serve(self, nursery: trio.Nursery) -> None:
        settings = self._settings
        routing = Routing(random.Random(), settings.known_prefixes)
        metrics = Metrics(table=FRONT_METRICS)
        secret, tell = settings.front.secret, None
        if self._feed is not None:
            sock = trio.socket.from_stdlib_socket(self._feed)
            feed = Feed(routing, sock, secret, metrics)
            tell = feed.tell
            nursery.start_soon(feed.run)

            def take_peers(addresses: tuple[Address, ...]) -> None:
                feed.peers = addresses
                metrics.gauge("tgi_front_peers", len(addresses))

            nursery.start_soon(follow_peers, settings.peers, sock.family, take_peers)
        fleet = Fleet(routing, settings.replica_timeout, tell, secret)
        for name in (*settings.replicas, *self._named):
            fleet.name(name)
        front = Front(fleet, metrics, settings.front)

        def take_keys(keys: tuple[str, ...]) -> None:
            front.settings = replace(front.settings, api_keys=keys)

        nursery.start_soon(watch_keys, settings.keys, settings.front.api_keys, take_keys)
        await nursery.start(fleet.run)
        # Before the first health checks the front would answer that there is no replica.
        with trio.move_on_after(FIRST_ANSWERS):
            await fleet.wait_polled()
        if settings.replicas_file is not None:
            take = partial(self._take_names, fleet)
            nursery.start_soon(watch_replicas, settings.replicas_file, take)
        for each in self._sockets:
            start_listening(each, BACKLOG)
        shutdown = trio.Event()
        server = ServerSettings(
            graceful_timeout=GRACE, certfile=settings.certfile, keyfile=settings.keyfile
        )
        # Each may take one more, to its replica.
        acceptor = counted_acceptor(metrics, max_connections(each=2), "tgi_front")
        async with trio.open_nursery() as serving:
            listening = partial(serve, front, self._sockets, server, shutdown, acceptor=acceptor)
            addresses = await serving.start(listening)
            self._tell(addresses)
            await self._stopping.wait()
            front.retire()
            if delay := settings.shutdown_delay:
                log.info("health is red; new requests are taken for another %g s", delay)
                await trio.sleep(delay)
            with trio.move_on_after(settings.graceful_timeout) as patience:
                await front.drain()
            if patience.cancelled_caught:
                log.warning(
                    "%d requests are cut off by --graceful-termination-timeout", front.running
                )
            shutdown.set()

    def _take_names(self, fleet: Fleet, names: list[str]) -> None:
        """Apply the file's new list; replicas of flags and of the API stay."""
        for name in names:
            fleet.name(name)
        for name in set(self._named).difference(names, self._settings.replicas):
            fleet.dismiss(name)
        self._named = names

    def _tell(self, addresses: Sequence[str]) -> None:
        """Print where the front listens; scripts wait for this line."""
        line = f"Front at {' and '.join(addresses)}"
        if self._settings.json_output:
            say_record(line, addresses=list(addresses))
        else:
            say(line)
