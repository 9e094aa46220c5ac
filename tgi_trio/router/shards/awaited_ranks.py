"""Accepts the connections of ranks on other machines, which then wait until a group is started.

`python -m tgi_trio rank` makes two connections for each incarnation (`rank_link.py`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import trio

from tgi_trio.errors import PeerError, PeerGone
from tgi_trio.router.shards.peer_acceptor import PeerAcceptor
from tgi_trio.router.shards.rank_connection import RankConnection
from tgi_trio.router.shards.rank_link import Join, Message, RankLink, Refused

log = logging.getLogger(__name__)


class AwaitedRanks:
    """A `RankSource` that waits until the ranks have connected."""

    def __init__(
        self, listeners: Sequence[socket.socket], secret: bytes, ranks: Sequence[int]
    ) -> None:
        """`listeners`: bound sockets; `ranks`: the numbers of the ranks that are to connect."""
        self.ranks = tuple(ranks)
        self._acceptor = PeerAcceptor(listeners, secret, self._receive)
        self._callers: dict[int, RankConnection] = {}
        self._arrival = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept connections until cancelled."""
        try:
            await self._acceptor.run(task_status)
        finally:
            for caller in self._callers.values():
                caller.close()

    @property
    def missing(self) -> list[int]:
        """The ranks that have not connected, or have disconnected again."""
        for rank in [rank for rank, each in self._callers.items() if each.link and each.frames]:
            if not self._callers[rank].connected:
                self._callers.pop(rank).close()
        callers = self._callers
        return [rank for rank in self.ranks if rank not in callers or not callers[rank].connected]

    async def wait_for_all(self) -> None:
        """Return when every rank can be taken."""
        reported: list[int] = []
        while missing := self.missing:
            if missing != reported:
                log.info("waiting for rank %s", ", ".join(map(str, missing)))
                reported = missing
            await self._arrival.wait()
            self._arrival = trio.Event()

    def take(self, rank: int) -> RankConnection:
        """Hand over a rank's connections to the caller. Raises PeerGone if it is missing."""
        if rank in self.missing:
            raise PeerGone(f"rank {rank}", "it has disconnected again")
        return self._callers.pop(rank)

    async def _receive(self, message: Message, link: RankLink) -> None:
        """Keep a rank's connection; refuse one that is not an expected rank's."""
        if not isinstance(message, Join) or message.rank not in self.ranks:
            wanted = ", ".join(map(str, self.ranks))
            await link.send(Refused(f"ranks of other machines are here: {wanted}"))
            raise PeerError(link.peer, f"said {message}, while ranks {wanted} are waited for")
        self._seat(message, link)

    def _seat(self, join: Join, link: RankLink) -> None:
        caller = self._callers.get(join.rank)
        if caller is None or caller.session != join.session:
            if caller is not None:  # the rank's program has been restarted
                caller.close()
            caller = self._callers[join.rank] = RankConnection(join.session)
        if join.carries_frames:
            caller.frames = link.stream
        else:
            caller.link = link
        if caller.connected:
            log.info("rank %d is on %s", join.rank, link.peer)
            self._arrival.set()
