"""The two connections to another machine on which a rank can be started.

Either that machine has connected to us (`awaited_ranks.py`), or we have connected to it
(`shard_calls.py`); from here on there is no difference.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Protocol

import trio

from tgi_trio.router.shards.rank_link import RankLink


@dataclass(slots=True)
class RankConnection:
    """A machine's connections, from the first one until its rank has ended."""

    session: str  # random; tells which two connections belong together
    link: RankLink | None = None
    frames: trio.SocketStream | None = None

    @property
    def connected(self) -> bool:
        """Whether both connections exist and the other end has not closed the link."""
        return self.link is not None and self.frames is not None and not _closed(self.link.stream)

    @property
    def own_host(self) -> str:
        """This machine's address on the connection to the other."""
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
        """Close both connections, as far as they exist."""
        if self.link is not None:
            self.link.stream.socket.close()
        if self.frames is not None:
            self.frames.socket.close()


class RankSource(Protocol):
    """Provides the connections to ranks on other machines, as long as the server runs."""

    ranks: tuple[int, ...]  # their numbers in the group

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connections until cancelled."""
        ...

    async def wait_for_all(self) -> None:
        """Return when every rank can be taken."""
        ...

    def take(self, rank: int) -> RankConnection:
        """Hand over a rank's connection to the caller. Raises PeerGone if it is missing.

        It may be though all were there: others have run since `wait_for_all` returned.
        """
        ...


def _closed(stream: trio.SocketStream) -> bool:
    """Return whether the other end has closed; it sends nothing while it waits."""
    with socket.socket(fileno=os.dup(stream.socket.fileno())) as own:
        try:
            return not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
