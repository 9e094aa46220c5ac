"""Connects to shards that listen on other machines (`python -m tgi_trio shard`).

If a shard cannot be reached or serves another router, connecting is tried again after a while: it
may be starting, or the other router may be the previous incarnation of this one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Final

import trio

from tgi_trio.errors import ConfigurationError, PeerError, PeerGone, ProtocolMismatch, tell_reason
from tgi_trio.router.shards.rank_connection import RankConnection
from tgi_trio.router.shards.rank_link import GREETING_S, Call, RankLink, Refused, Welcome, call

log = logging.getLogger(__name__)

SCHEME: Final = "tcp://"
_PAUSES: Final = (0.1, 2.0)  # seconds between two attempts: first and longest


def split_shard(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://host:port` or `tcp://[host]:port`."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    return host.strip("[]"), int(port)


class ShardCalls:
    """A `RankSource` that connects to the ranks' machines."""

    def __init__(self, addresses: Sequence[str], secret: bytes, ranks: Sequence[int]) -> None:
        """`addresses`: tcp://host:port of the shards for `ranks`, in the same order."""
        self.ranks = tuple(ranks)
        self._addresses = dict(zip(ranks, addresses, strict=True))
        self._secret = secret
        self._connections: dict[int, RankConnection] = {}
        self._answered: set[int] = set()  # ranks whose machines have accepted us before

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connections until cancelled."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._connections.values():
                connection.close()

    async def wait_for_all(self) -> None:
        """Return when every rank can be taken.

        Raises ConfigurationError, in an exception group, if a machine has another protocol or
        secret. If it has accepted us before, connecting is tried again: it may be in the middle of
        an upgrade.
        """
        while missing := [rank for rank in self.ranks if not self._is_there(rank)]:
            async with trio.open_nursery() as nursery:
                for rank in missing:
                    nursery.start_soon(self._call_until_there, rank)

    def take(self, rank: int) -> RankConnection:
        """Hand over a rank's connection to the caller. Raises PeerGone if it is missing."""
        if not self._is_there(rank):
            raise PeerGone(f"rank {rank}", "it has disconnected again")
        return self._connections.pop(rank)

    def _is_there(self, rank: int) -> bool:
        connection = self._connections.get(rank)
        # disconnected while others were called
        if connection is not None and not connection.connected:
            self._connections.pop(rank).close()
            connection = None
        return connection is not None

    async def _call_until_there(self, rank: int) -> None:
        address = self._addresses[rank]
        reported, (pause, longest) = "", _PAUSES
        while True:
            try:
                self._connections[rank] = await self._call(address)
            except ProtocolMismatch as error:
                why = error.problem
                if rank not in self._answered:
                    raise ConfigurationError(f"--shard {address}: {why}") from error
            except PeerError as error:
                why = error.problem
            except OSError as error:
                why = f"it cannot be reached: {tell_reason(error)}"
            else:
                log.info("the shard at %s has answered", address)
                self._answered.add(rank)
                return
            if why != reported:
                log.warning("--shard %s: %s; it is called again until it answers", address, why)
                reported = why
            await trio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _call(self, address: str) -> RankConnection:
        """Return both connections, accepted by the shard. Raises PeerError and OSError."""
        host, port = split_shard(address)
        connection = RankConnection(secrets.token_hex(16))
        try:
            for carries_frames in (False, True):
                message = Call(connection.session, carries_frames)
                link = await call(host, port, self._secret, message)
                if carries_frames:
                    connection.frames = link.stream
                else:
                    connection.link = link
                await _receive_welcome(link)
        except BaseException:
            connection.close()
            raise
        return connection


async def _receive_welcome(link: RankLink) -> None:
    """Return when a connection is accepted.

    Raises PeerGone if it is refused for now, ProtocolMismatch if it always will be.
    """
    with trio.move_on_after(GREETING_S) as patience:
        answer = await link.receive()
    if patience.cancelled_caught:
        raise PeerGone(link.peer, f"it has not said for {GREETING_S:g} s whether it is free")
    if isinstance(answer, Refused):
        raise (PeerGone if answer.for_now else ProtocolMismatch)(link.peer, answer.why)
    if not isinstance(answer, Welcome):
        raise ProtocolMismatch(link.peer, f"said {answer} first")
