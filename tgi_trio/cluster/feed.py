"""Fronts tell each other over UDP which request went to which replica.

Every front is configured with its peers and sends them its news ten times a second; what it
receives goes into its own routing. There is no leader and no shared store, and nothing waits. A
front that has just started knows little, and learns with every request.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final, TypeAlias

import trio

from tgi_trio.cluster.gossip import SENDER_BYTES, Outbox, RoutedRequest, read
from tgi_trio.cluster.prefix_chain import Chain
from tgi_trio.cluster.routing import Routing
from tgi_trio.router.telemetry.metrics import Metrics

Address: TypeAlias = tuple[str, int]  # of UDP: numeric host, port

INTERVAL_S: Final = 0.1  # at 1 s one prefix hit in 25 is lost (bench.cluster.routing --feed)
_MOST_BYTES: Final = 65_535

log = logging.getLogger("tgi_trio.cluster.feed")


class Feed:
    """Sends and receives gossip for one front. `tell` takes microseconds and never waits."""

    def __init__(
        self, routing: Routing, socket: trio.socket.SocketType, secret: bytes, metrics: Metrics
    ) -> None:
        """`socket`: a bound UDP socket; `metrics`: the front's."""
        # Set by `follow_peers`; None before the first look-up. This front may be among them.
        self.peers: tuple[Address, ...] | None = None
        self._routing = routing
        self._socket = socket
        self._secret = secret
        self._metrics = metrics
        self._sender = os.urandom(SENDER_BYTES)
        self._outbox = Outbox(secret, self._sender)
        self._warned = False  # one warning only: whoever sends bad datagrams may send many

    def tell(self, replica: str, chain: Chain) -> None:
        """Queue the gossip that a request went to `replica`; kept until peers are first looked
        up."""
        if self.peers != ():
            self._outbox.put(RoutedRequest(replica, chain))

    async def run(self, interval: float = INTERVAL_S) -> None:
        """Send and receive until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear)
            while True:
                await trio.sleep(interval)
                await self._send()

    async def _send(self) -> None:
        if self.peers is None:
            return
        for datagram in self._outbox.datagrams():
            for peer in self.peers:
                try:
                    await self._socket.sendto(datagram, peer)
                except OSError:  # unreachable: gossip is only a hint, so it is not sent again
                    self._metrics.inc("tgi_front_news_unsent")
                else:
                    self._metrics.inc("tgi_front_news_sent")

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(ConnectionError):  # ICMP: an earlier datagram reached nobody
                datagram, sender = await self._socket.recvfrom(_MOST_BYTES)
                self._learn(datagram, sender)

    def _learn(self, datagram: bytes, sender: object) -> None:
        try:
            heard = read(datagram, self._secret)
        except ValueError as error:
            if not self._warned:
                log.warning("from %s: %s; such datagrams are dropped", sender, error)
            self._warned = True
            self._metrics.inc("tgi_front_news_refused")
            return
        if heard.sender == self._sender:  # a DNS name of all fronts includes this one
            return
        self._metrics.inc("tgi_front_news_heard")
        for replica, chain in heard.items:
            self._routing.learn(replica, chain)
