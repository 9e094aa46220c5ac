"""`python -m tgi_trio rank`: runs one rank of a group whose leader is on another machine.

It calls the leader, waits to be told what to run, runs that as a child (as the leader runs its
own), and says how it is doing. When it has ended, for whatever reason, it calls again: the leader
starts groups anew, and one needs all of its ranks.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from tgi_trio.errors import ConfigurationError, PeerError, PeerGone, ProtocolMismatch
from tgi_trio.ipc.channel import Endpoints
from tgi_trio.ipc.peering import Side
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.tcp import TcpSpec
from tgi_trio.router.shards.rank_link import (
    BEAT_S,
    Beat,
    Ended,
    Join,
    RankLink,
    Refused,
    Start,
    config_digest,
    greet,
)
from tgi_trio.router.shards.shard_instance import ShardArgv, ShardInstance, real_shard
from tgi_trio.router.text.tokenizer_files import tokenizer_json

log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0  # between two calls of a leader that is not there
_SMALL_RING: Final = 4096  # bytes: nothing goes through the rings, only the control page is used


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank of whose group runs here."""

    host: str  # the leader's
    port: int
    rank: int
    secret: bytes
    model_path: Path | None = None  # None: where the leader has it
    trusts_code: bool = False  # whether code that comes with a tokenizer may convert it


class RankHost:
    """The program: incarnations of one rank, one after the other."""

    def __init__(self, place: RankPlace, argv: ShardArgv = real_shard) -> None:
        self._place = place
        self._argv = argv

    async def run(self) -> None:
        """Run incarnations until cancelled; main thread only.

        Raises ConfigurationError when the leader does not want this rank, or knows another secret.
        """
        told = False
        while True:
            try:
                await self._incarnation()
                told = False
            except ProtocolMismatch as error:
                raise ConfigurationError(f"--leader: {error}") from error
            except (OSError, PeerGone) as error:
                if not told:
                    log.warning("the leader cannot be reached, which is tried again: %s", error)
                    told = True
            await trio.sleep(_PAUSE_S)

    async def _incarnation(self) -> None:
        """Call the leader, run what it wants to its end, and tell it."""
        place, session = self._place, secrets.token_hex(16)
        async with await self._call(session, frames=True) as frames:
            async with await self._call(session, frames=False) as stream:
                link = RankLink(stream, place.host)
                log.info("rank %d is called in at %s:%d", place.rank, place.host, place.port)
                start = await link.hear()
                if isinstance(start, Refused):
                    raise ConfigurationError(f"--rank {place.rank} is not wanted: {start.why}")
                if not isinstance(start, Start):
                    raise ProtocolMismatch(place.host, f"said {start} first")
                report = await self._serve(start, link, frames)
                log.info("%s", report)
                await link.say(Ended(report))

    async def _call(self, session: str, *, frames: bool) -> trio.SocketStream:
        place = self._place
        stream = await trio.open_tcp_stream(place.host, place.port)
        try:
            await greet(stream, place.secret, Side.CALLER, place.host)
            await RankLink(stream, place.host).say(Join(place.rank, session, frames))
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _serve(self, start: Start, link: RankLink, frames: trio.SocketStream) -> str:
        """Run the rank until it or the leader has ended; return the report of it."""
        told = ShardSettings.parse(start.settings)
        folder = self._place.model_path or told.model_path
        if (problem := _check_model(folder, start.model)) is not None:
            return problem
        tokenizer = told.tokenizer_file
        if tokenizer is not None:  # grammars are compiled where tokens are chosen: here
            tokenizer = tokenizer_json(folder, None, self._place.trusts_code)
        with ExitStack() as stack:
            endpoints = stack.enter_context(
                Endpoints.create(
                    self._place.rank,
                    start.incarnation,
                    request_bytes=_SMALL_RING,
                    reply_bytes=_SMALL_RING,
                )
            )
            fd = os.dup(frames.socket.fileno())
            stack.callback(os.close, fd)
            spec = TcpSpec(fd, self._place.rank, start.incarnation, start.largest)
            own = replace(
                told,
                model_path=folder,
                tokenizer_file=tokenizer,
                frames=spec.text(),
                local_rank=0,
                local_size=1,
            )
            shard = stack.enter_context(ShardInstance.spawn(self._argv, own, endpoints, [fd]))
            endpoints.release_child_ends()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_with, link, nursery.cancel_scope)
                nursery.start_soon(_beat, link, shard)
                nursery.start_soon(shard.pump_output)
                await shard.wait_for_death()
                nursery.cancel_scope.cancel()
            with trio.move_on_after(BEAT_S):  # one that is crashing says more by itself
                await shard.wait_for_end()
            shard.kill()
            report = await shard.finish()
        return report


def _check_model(folder: Path, digest: str) -> str | None:
    """Return what is wrong with the model's folder of this machine."""
    try:
        found = config_digest(folder)
    except OSError as error:
        return f"the model is not here: {error}; name it with --model-id"
    if found != digest:
        return f"{folder} holds another model than the leader's: their config.json differ"
    return None


async def _end_with(link: RankLink, scope: trio.CancelScope) -> None:
    """Return never; cancel `scope` when the leader closes its side, or is gone."""
    try:
        while True:
            log.warning("the leader said %s, which means nothing here", await link.hear())
    except PeerError as error:
        log.info("the group has ended: %s", error)
        scope.cancel()


async def _beat(link: RankLink, shard: ShardInstance) -> None:
    """Say how the rank is doing, again and again."""
    try:
        while True:
            await link.say(Beat(*shard.vitals))
            await trio.sleep(BEAT_S)
    except PeerGone:
        await trio.sleep_forever()  # `_end_with` ends the rank
