"""Fronts tell each other what they sent where, over UDP: no leader, no store, nobody waits.

Every front names its peers. What it sends goes to all of them a few times a second, and what it
hears it learns. A front that is new or was away knows little, and knows more with every request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import trio

from tgi_trio.cluster.news import Load, Outbox, Sent, read
from tgi_trio.cluster.prefix_chain import Chain
from tgi_trio.cluster.routing import Routing

Address: TypeAlias = tuple[str, int]  # of UDP: numeric host, port

INTERVAL_S: Final = 0.1  # 1 s costs a hit in twenty-five (bench.cluster.routing --feed)
_MOST_BYTES: Final = 65_535

log = logging.getLogger("tgi_trio.cluster.feed")


@dataclass
class FeedCounts:
    """What came and went, for metrics."""

    datagrams_sent: int = 0
    datagrams_heard: int = 0
    datagrams_refused: int = 0  # not signed with our secret, or not whole
    unsent: int = 0  # a peer's machine or the way to it would not take them


class Feed:
    """One front's end. `tell` and `tell_load` cost microseconds and never wait."""

    def __init__(
        self,
        routing: Routing,
        socket: trio.socket.SocketType,
        peers: Sequence[Address],
        secret: bytes,
    ) -> None:
        self.counts = FeedCounts()
        self._routing = routing
        self._socket = socket
        self._peers = tuple(peers)
        self._secret = secret
        self._outbox = Outbox(secret)

    def tell(self, replica: str, chain: Chain) -> None:
        """Have the peers hear that a request went there."""
        if self._peers:
            self._outbox.put(Sent(replica, chain))

    def tell_load(self, replica: str, *, running: int, waiting: int, slots: int) -> None:
        """Have the peers hear what a replica said of itself."""
        if self._peers:
            self._outbox.put(Load(replica, running, waiting, slots))

    async def run(self, interval: float = INTERVAL_S) -> None:
        """Send and hear until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear)
            while True:
                await trio.sleep(interval)
                await self._send()

    async def _send(self) -> None:
        for datagram in self._outbox.datagrams():
            for peer in self._peers:
                try:
                    await self._socket.sendto(datagram, peer)
                except OSError:  # nobody there, no way there: a hint less
                    self.counts.unsent += 1
                else:
                    self.counts.datagrams_sent += 1

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(ConnectionError):  # a peer that was not there, said late
                datagram, sender = await self._socket.recvfrom(_MOST_BYTES)
                self._learn(datagram, sender)

    def _learn(self, datagram: bytes, sender: object) -> None:
        try:
            items = read(datagram, self._secret)
        except ValueError as error:
            if not self.counts.datagrams_refused:  # one line: whoever sends may send many
                log.warning("from %s: %s; such datagrams are dropped", sender, error)
            self.counts.datagrams_refused += 1
            return
        self.counts.datagrams_heard += 1
        for item in items:
            match item:
                case Sent(replica, chain):
                    self._routing.learn(replica, chain)
                case Load(replica, running, waiting, slots):
                    self._routing.report(replica, running=running, waiting=waiting, slots=slots)
