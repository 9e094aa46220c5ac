"""`python -m tgi_trio rank`: runs one rank of a group whose leader is on another machine.

It connects to the leader, waits for the order to start, runs the rank as a child process (as the
leader runs its own ranks), and reports on it. When the rank has ended, for whatever reason, it
connects again, since the leader restarts groups and a group needs all of its ranks.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Final

import trio

from tgi_trio.errors import ConfigurationError, PeerGone, ProtocolMismatch, tell_reason
from tgi_trio.router.shards.rank_incarnation import OwnModel, run_incarnation
from tgi_trio.router.shards.rank_link import Ended, Join, RankLink, Refused, Start, call
from tgi_trio.router.shards.shard_instance import ShardArgv, real_shard

log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0  # between two attempts to connect


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank runs here, and who its leader is."""

    host: str  # the leader's
    port: int
    rank: int
    secret: bytes
    model: OwnModel


class RankHost:
    """Runs incarnations of one rank, one after the other."""

    def __init__(self, place: RankPlace, argv: ShardArgv = real_shard) -> None:
        self._place = place
        self._argv = argv

    async def run(self) -> None:
        """Run incarnations until cancelled; main thread only.

        Raises ConfigurationError if the leader refuses this rank or has another secret.
        """
        reported = False
        while True:
            try:
                await self._incarnation()
                reported = False
            except ProtocolMismatch as error:
                raise ConfigurationError(f"--leader: {error}") from error
            except (OSError, PeerGone) as error:
                if not reported:
                    log.warning(
                        "the leader cannot be reached, which is tried again: %s", tell_reason(error)
                    )
                    reported = True
            await trio.sleep(_PAUSE_S)

    async def _incarnation(self) -> None:
        """Connect to the leader, run the rank until it ends, and send the report."""
        place, session = self._place, secrets.token_hex(16)
        frames = await self._call(session, frames=True)
        async with frames.stream:
            link = await self._call(session, frames=False)
            async with link.stream:
                log.info("rank %d is called in at %s:%d", place.rank, place.host, place.port)
                start = await link.receive()
                if isinstance(start, Refused):
                    raise ConfigurationError(f"--rank {place.rank} is not wanted: {start.why}")
                if not isinstance(start, Start):
                    raise ProtocolMismatch(place.host, f"said {start} first")
                report = await run_incarnation(start, link, frames.stream, place.model, self._argv)
                log.info("%s", report)
                await link.send(Ended(report))

    async def _call(self, session: str, *, frames: bool) -> RankLink:
        place = self._place
        join = Join(place.rank, session, frames)
        return await call(place.host, place.port, place.secret, join)
