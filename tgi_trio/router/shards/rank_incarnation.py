"""Runs one incarnation of a rank led by another machine: a child process that dies with its group.

Every incarnation has a process of its own, so that whatever it has allocated is freed when it ends.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from tgi_trio.errors import PeerError, PeerGone, SegmentError, tell_reason
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.tcp import TcpSpec
from tgi_trio.process.shortages import tell_shortage
from tgi_trio.router.shards.rank_link import BEAT_S, Beat, RankLink, Start, config_digest
from tgi_trio.router.shards.shard_instance import ShardArgv, ShardInstance
from tgi_trio.router.text.tokenizer_files import tokenizer_json

log = logging.getLogger(__name__)

_SMALL_RING: Final = 4096  # bytes; the rings are not used, only the control page is


@dataclass(frozen=True, slots=True)
class OwnModel:
    """This machine's own settings of the model."""

    path: Path | None = None  # None: the same path as on the leader's machine
    trusts_code: bool = False  # whether code that comes with a tokenizer may be run to convert it


async def run_incarnation(
    start: Start, link: RankLink, frames: trio.SocketStream, model: OwnModel, argv: ShardArgv
) -> str:
    """Run the rank until it or its leader has ended; returns a report. Main thread only."""
    given = ShardSettings.parse(start.settings)
    folder = model.path or given.model_path
    if (problem := _check_model(folder, start.model)) is not None:
        return problem
    tokenizer = given.tokenizer_file
    if tokenizer is not None:  # rank 0, which compiles grammars: make this machine's own file
        tokenizer = tokenizer_json(folder, None, model.trusts_code)
    own = replace(given, model_path=folder, tokenizer_file=tokenizer, local_rank=0, local_size=1)
    with ExitStack() as stack:
        try:
            shard = _start_shard(stack, start, own, frames, argv)
        # There may be memory, a process and descriptors later: the leader tries again.
        except (OSError, SegmentError) as error:
            return f"rank {own.rank} cannot be started: {tell_shortage(error)}"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_with, link, nursery.cancel_scope)
            nursery.start_soon(_beat, link, shard)
            nursery.start_soon(shard.pump_output)
            await shard.wait_for_death()
            nursery.cancel_scope.cancel()
        with trio.move_on_after(BEAT_S):  # a crashing rank's own exit code says more
            await shard.wait_for_end()
        alone, who = shard.has_ended, shard.describe()
        shard.kill()
        report = await shard.finish()
    return report if alone else f"{who} was ended with its group."


def _start_shard(
    stack: ExitStack, start: Start, own: ShardSettings, frames: trio.SocketStream, argv: ShardArgv
) -> ShardInstance:
    """Start the rank's process; closing `stack` ends it. Raises OSError and SegmentError."""
    endpoints = stack.enter_context(
        Endpoints.create(
            own.rank, start.incarnation, request_bytes=_SMALL_RING, reply_bytes=_SMALL_RING
        )
    )
    fd = os.dup(frames.socket.fileno())
    stack.callback(os.close, fd)
    spec = TcpSpec(fd, own.rank, start.incarnation)
    settings = replace(own, frames=spec.text())
    shard = stack.enter_context(ShardInstance.spawn(argv, settings, endpoints, [fd]))
    endpoints.release_child_ends()
    return shard


def _check_model(folder: Path, digest: str) -> str | None:
    """Return what is wrong with the model's folder on this machine; None if nothing is."""
    try:
        found = config_digest(folder)
    except OSError as error:
        return f"the model is not here: {tell_reason(error)}; name it with --model-id"
    if found != digest:
        return f"{folder} holds another model than the leader's: their config.json differ"
    return None


async def _end_with(link: RankLink, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the leader closes its side or is gone; never returns before that."""
    try:
        while True:
            log.warning("the leader said %s, which means nothing here", await link.receive())
    except PeerError as error:
        log.info("the group has ended: %s", error)
        scope.cancel()


async def _beat(link: RankLink, shard: ShardInstance) -> None:
    """Send the rank's vitals every `BEAT_S` seconds."""
    try:
        while True:
            await link.send(Beat(*shard.vitals))
            await trio.sleep(BEAT_S)
    except PeerGone:
        await trio.sleep_forever()  # `_end_with` ends the rank
