"""Where ranks of other machines come to, and wait until a group is started.

`python -m tgi_trio rank` calls twice for each incarnation (`rank_link.py`). Nothing that a caller
says is looked at before it has proven that it knows the cluster's secret.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from tgi_trio.errors import PeerError
from tgi_trio.ipc.peering import Side
from tgi_trio.router.shards.rank_link import GREETING_S, Join, RankLink, Refused, greet

log = logging.getLogger(__name__)

_UNKNOWN: Final = 32  # callers at a time that have not yet shown who they are
_PAUSE_S: Final = 0.1  # where one cannot be accepted


@dataclass(slots=True)
class Caller:
    """A rank of another machine that waits to be started."""

    session: str
    link: RankLink | None = None
    frames: trio.SocketStream | None = None

    @property
    def connected(self) -> bool:
        """Whether both connections are there, and nobody has closed the first."""
        return self.link is not None and self.frames is not None and not _closed(self.link.stream)

    @property
    def own_host(self) -> str:
        """The address of this machine that the rank's has called."""
        return self._both[0].own_host

    @property
    def frames_fd(self) -> int:
        """The descriptor of the connection that carries frames."""
        return self._both[1].socket.fileno()

    @property
    def _both(self) -> tuple[RankLink, trio.SocketStream]:
        if self.link is None or self.frames is None:
            raise ValueError("one of two connections is missing: ask `connected` first")
        return self.link, self.frames

    def close(self) -> None:
        """Close what there is."""
        if self.link is not None:
            self.link.stream.socket.close()
        if self.frames is not None:
            self.frames.socket.close()


class RankDesk:
    """Listens for the ranks that run on other machines, for as long as the server runs."""

    def __init__(
        self, listeners: Sequence[socket.socket], secret: bytes, ranks: Sequence[int]
    ) -> None:
        """`listeners` are bound; `ranks`: those that are to come."""
        self.ranks = tuple(ranks)
        self._listeners = listeners
        self._secret = secret
        self._callers: dict[int, Caller] = {}
        self._arrival = trio.Event()
        self._unknown = trio.Semaphore(_UNKNOWN)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let callers in until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                for listener in self._listeners:
                    listener.listen(_UNKNOWN)
                    own = trio.SocketListener(trio.socket.from_stdlib_socket(listener.dup()))
                    nursery.start_soon(self._listen, own, nursery)
                task_status.started()
        finally:
            for caller in self._callers.values():
                caller.close()

    @property
    def missing(self) -> list[int]:
        """The ranks that nobody has come for, or whose caller has left again."""
        for rank in [rank for rank, each in self._callers.items() if each.link and each.frames]:
            if not self._callers[rank].connected:
                self._callers.pop(rank).close()
        callers = self._callers
        return [rank for rank in self.ranks if rank not in callers or not callers[rank].connected]

    async def wait_for_all(self) -> None:
        """Return when every rank can be taken."""
        told: list[int] = []
        while missing := self.missing:
            if missing != told:
                log.info("waiting for rank %s", ", ".join(map(str, missing)))
                told = missing
            await self._arrival.wait()
            self._arrival = trio.Event()

    def take(self, rank: int) -> Caller:
        """Return a rank's caller, no longer ours; raises KeyError for one that is missing."""
        return self._callers.pop(rank)

    async def _listen(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                await self._unknown.acquire()
                try:
                    stream = await listener.accept()
                    address = str(stream.socket.getpeername()[0])
                except OSError as error:  # no descriptors are left, say
                    self._unknown.release()
                    log.warning("a caller cannot be let in: %s", error)
                    await trio.sleep(_PAUSE_S)
                    continue
                nursery.start_soon(self._let_in, stream, address)

    async def _let_in(self, stream: trio.SocketStream, peer: str) -> None:
        """Learn who calls, and have it wait; whoever is none of ours is sent away."""
        link = RankLink(stream, peer)
        try:
            try:
                await greet(stream, self._secret, Side.CALLED, peer)
            finally:
                self._unknown.release()
            with trio.fail_after(GREETING_S):
                join = await link.hear()
            if not isinstance(join, Join) or join.rank not in self.ranks:
                wanted = ", ".join(map(str, self.ranks))
                await link.say(Refused(f"ranks of other machines are here: {wanted}"))
                raise PeerError(peer, f"said {join}, while ranks {wanted} are waited for")
        except (PeerError, trio.TooSlowError) as error:
            log.warning("a caller is sent away: %s", error)
            await trio.aclose_forcefully(stream)
            return
        self._seat(join, link)

    def _seat(self, join: Join, link: RankLink) -> None:
        caller = self._callers.get(join.rank)
        if caller is None or caller.session != join.session:
            if caller is not None:  # its machine has started anew
                caller.close()
            caller = self._callers[join.rank] = Caller(join.session)
        if join.carries_frames:
            caller.frames = link.stream
        else:
            caller.link = link
        if caller.connected:
            log.info("rank %d is on %s", join.rank, link.peer)
            self._arrival.set()


def _closed(stream: trio.SocketStream) -> bool:
    """Return whether the other end has closed; nothing is said there while it waits."""
    with socket.socket(fileno=os.dup(stream.socket.fileno())) as own:
        try:
            return not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
