"""Fronts tell each other what they sent where, over UDP: no leader, no store, nobody waits.

Every front names its peers. What it sends goes to all of them a few times a second, and what it
hears it learns. A front that is new or was away knows little, and knows more with every request.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final, TypeAlias

import trio

from tgi_trio.cluster.news import SENDER_BYTES, Outbox, Sent, read
from tgi_trio.cluster.prefix_chain import Chain
from tgi_trio.cluster.routing import Routing
from tgi_trio.router.telemetry.metrics import Metrics

Address: TypeAlias = tuple[str, int]  # of UDP: numeric host, port

INTERVAL_S: Final = 0.1  # 1 s costs a hit in twenty-five (bench.cluster.routing --feed)
_MOST_BYTES: Final = 65_535

log = logging.getLogger("tgi_trio.cluster.feed")


class Feed:
    """One front's end. `tell` costs microseconds and never waits."""

    def __init__(
        self, routing: Routing, socket: trio.socket.SocketType, secret: bytes, metrics: Metrics
    ) -> None:
        """`socket`: bound, of UDP; `metrics`: those of a front."""
        # Set by who looks them up, None before the first look; this front may be among them.
        self.peers: tuple[Address, ...] | None = None
        self._routing = routing
        self._socket = socket
        self._secret = secret
        self._metrics = metrics
        self._sender = os.urandom(SENDER_BYTES)
        self._outbox = Outbox(secret, self._sender)
        self._warned = False  # of datagrams that were refused: whoever sends may send many

    def tell(self, replica: str, chain: Chain) -> None:
        """Have the peers hear that a request went there; what comes before the first look waits."""
        if self.peers != ():
            self._outbox.put(Sent(replica, chain))

    async def run(self, interval: float = INTERVAL_S) -> None:
        """Send and hear until cancelled."""
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
                except OSError:  # nobody there, no way there: a hint less
                    self._metrics.inc("tgi_front_news_unsent")
                else:
                    self._metrics.inc("tgi_front_news_sent")

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(ConnectionError):  # a peer that was not there, said late
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
        if heard.sender == self._sender:  # a name of all fronts names this one as well
            return
        self._metrics.inc("tgi_front_news_heard")
        for replica, chain in heard.items:
            self._routing.learn(replica, chain)
