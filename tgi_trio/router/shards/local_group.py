"""The shard group of this router: child processes that share memory, and ranks on other machines.

The router talks to rank 0 alone, which leads the others. The ranks compute every step together, so
when one of them ends, the whole group is ended. A group of one rank may be on another machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import trio

from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.doorbell import affordable_spin_us
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.ipc.tcp import TcpSpec
from tgi_trio.ipc.tcp_router_end import TcpRouterEnd
from tgi_trio.ipc.waiting import WaitingShards
from tgi_trio.process.sockets import address_text
from tgi_trio.router.shards.group import Group, Rank, StartGroup
from tgi_trio.router.shards.rank_connection import RankConnection, RankSource
from tgi_trio.router.shards.remote_rank import RemoteRank
from tgi_trio.router.shards.ring_sizes import plan_ring_bytes
from tgi_trio.router.shards.shard_instance import ShardArgv, ShardInstance

_LAST_GASP = 0.2  # seconds for a crashing rank to exit: its exit code says more than SIGKILL's


class LocalGroup:
    """Implements `Group`: the running shards of one incarnation, in rank order."""

    def __init__(self, ranks: Sequence[Rank], end: CommandChannel) -> None:
        """`end`: the router's end of rank 0's channel."""
        self._ranks = tuple(ranks)
        self._end = end

    @staticmethod
    def starter(
        argv: ShardArgv,
        settings: ShardSettings,
        spin_us: int = 0,
        source: RankSource | None = None,
        waiting: WaitingShards | None = None,
    ) -> StartGroup:
        """Return a function that starts groups of `settings.world_size` ranks.

        `spin_us`: how long a reader of a ring spins before it sleeps, if there are cores to spare.
        `source`: provides the last ranks, if some run on other machines; all of them must have
        connected. `waiting`: pre-started processes, which are used first. The arena of images is
        the router's, one for all groups; rank 0 inherits its descriptor.
        """
        affordable = affordable_spin_us(spin_us, shards=settings.world_size)

        def start(request: WarmupRequest, incarnation: int) -> AbstractContextManager[Group]:
            if source is not None and 0 in source.ranks:
                return LocalGroup.start_remote(settings, incarnation, source)
            return LocalGroup.spawn(
                argv, settings, request, incarnation, affordable, source, waiting
            )

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
        source: RankSource | None = None,
        waiting: WaitingShards | None = None,
    ) -> Iterator[LocalGroup]:
        """Start every rank; leaving the context kills those that still run. Main thread only."""
        with ExitStack() as stack:
            bell = stack.enter_context(ReplyBell())
            leading = Endpoints.create(
                0,
                incarnation,
                reply_bell=bell.fd,
                spin_us=spin_us,
            )
            channels = [stack.enter_context(leading)]
            here = settings.world_size - (len(source.ranks) if source else 0)
            for rank in range(1, here):
                follower = Endpoints.create(
                    rank,
                    incarnation,
                    request_bytes=plan_ring_bytes(request),
                    spin_us=spin_us,
                )
                channels.append(stack.enter_context(follower))
            ranks: list[Rank] = []
            rendezvous, remote = -1, None
            specs = [channel.spec.text() for channel in channels[1:]]
            fds = [fd for channel in channels[1:] for fd in channel.spec.fds]
            if source is not None:
                remote = _start_remote_ranks(
                    stack, source, replace(settings, local_size=here), incarnation
                )
                settings, rendezvous = remote.settings, remote.rendezvous
                specs, fds = specs + remote.specs, fds + remote.fds
            elif here > 1:
                rendezvous = os.memfd_create("tgi-trio ranks")
                stack.callback(os.close, rendezvous)
            for rank, endpoints in enumerate(channels):
                own = replace(
                    settings,
                    rank=rank,
                    local_rank=rank if source else 0,
                    followers=tuple(specs) if rank == 0 else (),
                    image_arena=settings.image_arena if rank == 0 else -1,
                    rendezvous=rendezvous if rank == 0 or not source else -1,
                )
                inherited = [fd for fd in (own.rendezvous, own.image_arena) if fd >= 0]
                inherited += fds if rank == 0 else []
                start = ShardInstance.spawn(argv, own, endpoints, inherited, waiting)
                ranks.append(stack.enter_context(start))
            for endpoints in channels:  # only now, since rank 0 inherits all of them
                endpoints.release_child_ends()
            ranks += remote.ranks if remote else []
            yield cls(ranks, stack.enter_context(RouterEnd(leading, bell)))

    @classmethod
    @contextmanager
    def start_remote(
        cls, settings: ShardSettings, incarnation: int, source: RankSource
    ) -> Iterator[LocalGroup]:
        """Start a group of one rank on another machine; leaving the context ends it."""
        connection = source.take(0)
        own = replace(settings, rank=0, image_arena=-1)
        with (
            RemoteRank.start(connection, own, incarnation) as rank,
            closing(TcpRouterEnd(os.dup(connection.frames_fd), rank.describe)) as end,
        ):
            yield cls([rank], end)

    @property
    def end(self) -> CommandChannel:
        return self._end

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def vitals(self, rank: int) -> Vitals:
        return self._ranks[rank].vitals

    def describe(self, rank: int) -> str:
        return self._ranks[rank].describe()

    async def pump_output(self) -> None:
        """Log all ranks' output until they have closed it."""
        async with trio.open_nursery() as nursery:
            for rank in self._ranks:
                nursery.start_soon(rank.pump_output)

    async def wait_for_death(self) -> None:
        """Return when one of the ranks has died."""
        await _first_of([rank.wait_for_death for rank in self._ranks])

    async def end_all(self, patient: bool) -> str:
        """End every rank and wait for it; returns the reports of those that had died by themselves.

        Of all ranks if none had. `patient`: give a crashing rank time to exit by itself.
        """
        if patient:
            with trio.move_on_after(_LAST_GASP):
                await _first_of([rank.wait_for_end for rank in self._ranks])
        ended = [rank.has_ended for rank in self._ranks]
        for rank in self._ranks:
            rank.kill()
        reports = [await rank.finish() for rank in self._ranks]
        reported = [report for report, alone in zip(reports, ended, strict=True) if alone]
        return "\n".join(reported or reports)


async def _first_of(waits: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Return when one of `waits` does."""
    async with trio.open_nursery() as nursery:

        async def watch(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            nursery.cancel_scope.cancel()

        for wait in waits:
            nursery.start_soon(watch, wait)


@dataclass(frozen=True, slots=True)
class _RemoteRanks:
    """The ranks on other machines, and what the ranks on this machine need for them."""

    ranks: list[RemoteRank]
    settings: ShardSettings  # of all ranks, with the address at which they meet
    rendezvous: int  # descriptor of the socket on which rank 0 listens
    specs: list[str]  # of rank 0's channels to them
    fds: list[int]  # inherited by rank 0 for these channels


def _start_remote_ranks(
    stack: ExitStack, source: RankSource, settings: ShardSettings, incarnation: int
) -> _RemoteRanks:
    """Start the ranks of `source`; closing `stack` ends them."""
    connections: list[RankConnection] = []
    for rank in source.ranks:
        connections.append(source.take(rank))
        stack.callback(connections[-1].close)  # also if the next one is missing
    meeting = stack.enter_context(_listen(connections[0].own_host))
    remote = _RemoteRanks(
        [], replace(settings, meeting=address_text(meeting)), meeting.fileno(), [], []
    )
    for rank, connection in zip(source.ranks, connections, strict=True):
        own = replace(remote.settings, rank=rank, tokenizer_file=None, image_arena=-1)
        start = RemoteRank.start(connection, own, incarnation)
        remote.ranks.append(stack.enter_context(start))
        remote.fds.append(connection.frames_fd)
        remote.specs.append(TcpSpec(connection.frames_fd, rank, incarnation).text())
    return remote


def _listen(host: str) -> socket.socket:
    """Return the socket on which rank 0 listens for the other ranks, at this machine's `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
