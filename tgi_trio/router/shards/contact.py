"""A rank on another machine that can be started: the two connections to that machine.

Either that machine has called (`awaited_ranks.py`), or it listens and has been called
(`shard_calls.py`). From here on both are the same.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Protocol

import trio

from tgi_trio.router.shards.rank_link import RankLink


@dataclass(slots=True)
class Contact:
    """Who has come, or has been reached, until it is complete and then until its rank has ended."""

    session: str  # what tells its connections from others'
    link: RankLink | None = None
    frames: trio.SocketStream | None = None

    @property
    def connected(self) -> bool:
        """Whether both connections are there, and nobody has closed the first."""
        return self.link is not None and self.frames is not None and not _closed(self.link.stream)

    @property
    def own_host(self) -> str:
        """The address of this machine on the way to the other."""
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


class RankSource(Protocol):
    """Where the ranks that run on other machines come from, for as long as the server runs."""

    ranks: tuple[int, ...]  # which of the group's they are

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep contacts until cancelled."""
        ...

    async def wait_for_all(self) -> None:
        """Return when every rank can be taken."""
        ...

    def take(self, rank: int) -> Contact:
        """Return a rank's contact, no longer ours; raises KeyError for one that is missing."""
        ...


def _closed(stream: trio.SocketStream) -> bool:
    """Return whether the other end has closed; nothing is said there while it waits."""
    with socket.socket(fileno=os.dup(stream.socket.fileno())) as own:
        try:
            return not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
