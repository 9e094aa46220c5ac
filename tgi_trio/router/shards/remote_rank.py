"""A rank on another machine, as reported by that machine over its `RankLink`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import trio

from tgi_trio.errors import PeerError, PeerGone
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.tcp import GONE_S
from tgi_trio.router.shards.rank_connection import RankConnection
from tgi_trio.router.shards.rank_link import Beat, Ended, RankLink, Start, config_digest

log = logging.getLogger("tgi_trio.shard")


class RemoteRank:
    """Implements `Rank`."""

    def __init__(self, link: RankLink, rank: int, incarnation: int) -> None:
        """`link`: to the rank's machine; used by this object alone from now on."""
        self.rank = rank
        self.pid: int | None = None  # it means nothing on this machine
        self.vitals = Vitals(0, Phase.STARTING, 0, 0)
        self._incarnation = incarnation
        self._link = link
        self._over = trio.Event()
        self._report: str | None = None

    @classmethod
    @contextmanager
    def start(
        cls, connection: RankConnection, settings: ShardSettings, incarnation: int
    ) -> Iterator[RemoteRank]:
        """Have the machine of `connection` run the rank of `settings`; leaving the context ends it.

        Rank 0 uses the connection for frames; it is closed here when the context is left.
        """
        if connection.link is None:
            raise ValueError("a rank needs both connections to its machine: ask `connected` first")
        try:
            rank = cls(connection.link, settings.rank, incarnation)
            digest = config_digest(settings.model_path)
            rank._say_now(Start(settings.text(), incarnation, digest))
            yield rank
        finally:
            connection.close()

    def describe(self) -> str:
        """Return rank, machine, pid, phase and step, for error messages."""
        return (
            f"rank {self.rank} on {self._link.peer} (pid {self.vitals.pid}, incarnation "
            f"{self._incarnation}, phase {self._phase}, step {self.vitals.step})"
        )

    async def pump_output(self) -> None:
        """Receive the rank's vitals until it has ended. Its machine logs its output."""
        try:
            while not self._over.is_set():
                self._note(await self._link.receive())
        except PeerError as error:
            self._report = f"{self.describe()}: {error.problem}."
            self._over.set()

    async def wait_for_death(self) -> None:
        """Return when the rank has ended, or its machine is gone."""
        await self._over.wait()

    async def wait_for_end(self) -> None:
        """Return when the rank has ended; without `pump_output` beside it."""
        await self.pump_output()

    @property
    def has_ended(self) -> bool:
        return self._over.is_set()

    def kill(self) -> None:
        """Have its machine end it, by closing our side of the link."""
        try:
            self._link.stream.socket.shutdown(trio.socket.SHUT_WR)
        except OSError as error:  # it has disconnected already
            log.debug("%s: %s", self._link.peer, error)

    async def finish(self) -> str:
        """Wait until the rank has ended, `GONE_S` seconds at most; returns a report."""
        with trio.move_on_after(GONE_S):
            await self.pump_output()
        return self._report or f"{self.describe()} does not answer any more."

    def _note(self, message: msgspec.Struct) -> None:
        if isinstance(message, Beat):
            self.vitals = Vitals(message.heartbeat, message.phase, message.step, message.pid)
        elif isinstance(message, Ended):
            self._report = f"On {self._link.peer}: {message.report}"
            self._over.set()
        else:
            raise PeerError(self._link.peer, f"said {message}, which nobody has asked for")

    def _say_now(self, message: Start) -> None:
        try:
            self._link.send_nowait(message)
        except PeerGone as error:  # `pump_output` will find it gone
            log.warning("%s", error)

    @property
    def _phase(self) -> str:
        return Phase(min(self.vitals.phase, Phase.STOPPING)).name
