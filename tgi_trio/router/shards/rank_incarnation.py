"""One incarnation of a rank that another machine leads: a child here, which dies with its group.

A process for each: whatever one has allocated, its machine has back when it has ended, and the next
group begins as on a machine that has just been started.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trio

from tgi_trio.errors import PeerError, PeerGone
from tgi_trio.ipc.channel import Endpoints
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.tcp import TcpSpec
from tgi_trio.router.shards.rank_link import BEAT_S, Beat, RankLink, Start, config_digest
from tgi_trio.router.shards.shard_instance import ShardArgv, ShardInstance
from tgi_trio.router.text.tokenizer_files import tokenizer_json

log = logging.getLogger(__name__)

_SMALL_RING: Final = 4096  # bytes: nothing goes through the rings, only the control page is used


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What a machine says itself of the model that a rank of it computes."""

    path: Path | None = None  # None: where the leader has it
    trusts_code: bool = False  # whether code that comes with a tokenizer may convert it


async def run_incarnation(
    start: Start, link: RankLink, frames: trio.SocketStream, model: OwnModel, argv: ShardArgv
) -> str:
    """Run the rank until it or its leader has ended; return the report of it. Main thread only."""
    told = ShardSettings.parse(start.settings)
    folder = model.path or told.model_path
    if (problem := _check_model(folder, start.model)) is not None:
        return problem
    tokenizer = told.tokenizer_file
    if tokenizer is not None:  # grammars are compiled where tokens are chosen: here
        tokenizer = tokenizer_json(folder, None, model.trusts_code)
    with ExitStack() as stack:
        endpoints = stack.enter_context(
            Endpoints.create(
                told.rank,
                start.incarnation,
                request_bytes=_SMALL_RING,
                reply_bytes=_SMALL_RING,
            )
        )
        fd = os.dup(frames.socket.fileno())
        stack.callback(os.close, fd)
        spec = TcpSpec(fd, told.rank, start.incarnation, start.largest)
        own = replace(
            told,
            model_path=folder,
            tokenizer_file=tokenizer,
            frames=spec.text(),
            local_rank=0,
            local_size=1,
        )
        shard = stack.enter_context(ShardInstance.spawn(argv, own, endpoints, [fd]))
        endpoints.release_child_ends()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_with, link, nursery.cancel_scope)
            nursery.start_soon(_beat, link, shard)
            nursery.start_soon(shard.pump_output)
            await shard.wait_for_death()
            nursery.cancel_scope.cancel()
        with trio.move_on_after(BEAT_S):  # one that is crashing says more by itself
            await shard.wait_for_end()
        alone, who = shard.has_ended, shard.describe()
        shard.kill()
        report = await shard.finish()
    return report if alone else f"{who} was ended with its group."


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
