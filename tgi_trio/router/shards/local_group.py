"""The shard group on this machine: a child process per rank, shared memory between them.

The router talks to rank 0; the others follow it.
A group lives and dies together: its ranks compute every step in common, so whichever of them ends
takes the others along.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import trio

from tgi_trio.ipc.channel import Endpoints
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.doorbell import affordable_spin_us
from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES
from tgi_trio.ipc.frames import Kind, Phase, frame_bytes
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.ipc.watch import wait_for_death
from tgi_trio.router.shards.group import Group, StartGroup
from tgi_trio.router.shards.shard_instance import ShardArgv, ShardInstance

_LAST_GASP = 0.2  # seconds for a crash to finish by itself: its exit code says more than ours
_PLANS_IN_A_RING = 4  # a follower is a step behind at most; the rest is room to wrap around


class LocalGroup:
    """Implements `Group`: the running shards of one incarnation, in rank order."""

    def __init__(self, shards: Sequence[ShardInstance], end: RouterEnd) -> None:
        """`end`: the router's end of rank 0's channel."""
        self._shards = tuple(shards)
        self._end = end

    @staticmethod
    def starter(argv: ShardArgv, settings: ShardSettings, spin_us: int = 0) -> StartGroup:
        """Return what starts groups of `settings.world_size` processes.

        `spin_us`: how long a reader of a ring stays awake, if there are cores to spare. The arena
        of images is the router's own, one for all groups: rank 0 inherits its descriptor.
        """
        affordable = affordable_spin_us(spin_us, shards=settings.world_size)

        def start(request: WarmupRequest, incarnation: int) -> AbstractContextManager[Group]:
            return LocalGroup.spawn(argv, settings, request, incarnation, affordable)

        return start

    @classmethod
    @contextmanager
    def spawn(
        cls,
        argv: ShardArgv,
        settings: ShardSettings,
        request: WarmupRequest,
        incarnation: int,
        spin_us: int,
    ) -> Iterator[LocalGroup]:
        """Start a process per rank; leaving the block kills what is left. Main thread only."""
        with ExitStack() as stack:
            bell = stack.enter_context(ReplyBell())
            leading = Endpoints.create(0, incarnation, reply_bell=bell.fd, spin_us=spin_us)
            channels = [stack.enter_context(leading)]
            for rank in range(1, settings.world_size):
                follower = Endpoints.create(
                    rank, incarnation, request_bytes=_plan_ring_bytes(request), spin_us=spin_us
                )
                channels.append(stack.enter_context(follower))
            meeting = os.memfd_create("tgi-trio ranks") if len(channels) > 1 else -1
            if meeting >= 0:
                stack.callback(os.close, meeting)
            shards = []
            for rank, endpoints in enumerate(channels):
                followers = channels[1:] if rank == 0 else []
                own = replace(
                    settings,
                    rank=rank,
                    followers=tuple(channel.spec.text() for channel in followers),
                    image_arena=settings.image_arena if rank == 0 else -1,
                    rendezvous=meeting,
                )
                fds = [fd for channel in followers for fd in channel.spec.fds]
                fds += [fd for fd in (meeting, own.image_arena) if fd >= 0]
                shards.append(stack.enter_context(ShardInstance.spawn(argv, own, endpoints, fds)))
            for endpoints in channels:  # not before: rank 0 inherits all of them
                endpoints.release_child_ends()
            yield cls(shards, stack.enter_context(RouterEnd(leading, bell)))

    @property
    def end(self) -> RouterEnd:
        return self._end

    @property
    def world_size(self) -> int:
        return len(self._shards)

    @property
    def pids(self) -> list[int]:
        return [shard.process.pid for shard in self._shards]

    def vitals(self, rank: int) -> Vitals:
        return self._shards[rank].page.vitals

    def describe(self, rank: int) -> str:
        return self._shards[rank].page.describe_shard()

    async def pump_output(self) -> None:
        """Log all shards' output until they have closed it."""
        async with trio.open_nursery() as nursery:
            for shard in self._shards:
                nursery.start_soon(shard.pump_output)

    async def wait_for_death(self) -> None:
        """Return when one of the shards has died."""
        async with trio.open_nursery() as nursery:

            async def watch(shard: ShardInstance) -> None:
                await wait_for_death(shard.process.pidfd, shard.page)
                nursery.cancel_scope.cancel()

            for shard in self._shards:
                nursery.start_soon(watch, shard)

    async def end_all(self, patient: bool) -> str:
        """Kill and reap every shard; return what is to be said of those that ended by themselves.

        Of all of them when none did. `patient`: let one that is crashing finish first.
        """
        phases = [
            Phase(min(shard.page.vitals.phase, Phase.STOPPING)).name for shard in self._shards
        ]
        if patient:
            with trio.move_on_after(_LAST_GASP):
                await self._wait_for_end()
        ended = [shard.process.process.poll() is not None for shard in self._shards]
        reports = []
        for shard in self._shards:
            shard.process.kill()
        for shard, phase, by_itself in zip(self._shards, phases, ended, strict=True):
            code = await shard.process.reap()
            shard.drain_output()
            if by_itself or not any(ended):
                reports.append(shard.report(code, phase))
        return "\n".join(reports)

    async def _wait_for_end(self) -> None:
        async with trio.open_nursery() as nursery:

            async def watch(shard: ShardInstance) -> None:
                await trio.lowlevel.wait_readable(shard.process.pidfd)
                nursery.cancel_scope.cancel()

            for shard in self._shards:
                nursery.start_soon(watch, shard)


def _plan_ring_bytes(request: WarmupRequest) -> int:
    """Return the bytes of a ring in which a few of the largest plans find room."""
    rows, tokens = request.max_batch_size, max(request.max_prefill_tokens, request.max_batch_size)
    entries = rows * -(-request.max_total_tokens // BLOCK_SIZE)
    images = {"features": tokens, "rotary": 3 * tokens, "limits": tokens}
    largest = frame_bytes(
        Kind.PLAN, rows=rows, tokens=tokens, entries=entries, unknown=tokens, states=rows, **images
    )
    return max(DEFAULT_RING_BYTES, 1 << (_PLANS_IN_A_RING * largest - 1).bit_length())
