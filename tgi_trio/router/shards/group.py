"""What supervision needs of a shard group, wherever its ranks run.

`local_group.LocalGroup` is one whose rank 0 is on this machine. Its ranks are child processes here,
or run on other machines; nothing above this line knows of pages, descriptors or process ids that
mean something here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.startup import WarmupRequest


class Group(Protocol):
    """The running shards of one incarnation. They live and die together."""

    @property
    def end(self) -> CommandChannel:
        """The router's end of the way to rank 0: commands down, steps up."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def pids(self) -> Sequence[int]:
        """Process ids in rank order, as far as they mean something on this machine."""
        ...

    def vitals(self, rank: int) -> Vitals:
        """Return what a rank last said of itself: heartbeat, phase, step."""
        ...

    def describe(self, rank: int) -> str:
        """Return who a rank is and what it does, for error messages."""
        ...

    async def wait_for_death(self) -> None:
        """Return when one of the ranks has died."""
        ...

    async def pump_output(self) -> None:
        """Log what the ranks print until they have closed their output."""
        ...

    async def end_all(self, patient: bool) -> str:
        """End every rank and wait for it; return what is to be said of those that died first.

        Of all of them when none did. `patient`: let one that is crashing finish first.
        """
        ...


class Rank(Protocol):
    """One rank of a group: a `ShardInstance` of this machine, or a `RemoteRank`."""

    @property
    def pid(self) -> int | None:
        """Its process id, where it means something on this machine."""
        ...

    @property
    def vitals(self) -> Vitals: ...

    def describe(self) -> str: ...

    async def wait_for_death(self) -> None:
        """Return when it has died; while `pump_output` runs."""
        ...

    async def wait_for_end(self) -> None:
        """Return when its process has ended altogether; when nothing else runs any more."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def kill(self) -> None:
        """Have it end now; harmless when it has ended."""
        ...

    async def finish(self) -> str:
        """Wait until it has ended and return what is to be said of it."""
        ...

    async def pump_output(self) -> None: ...


# (what the KV cache is sized for, number of the incarnation) -> the group, which leaving the block
# ends. Called once per incarnation.
StartGroup = Callable[[WarmupRequest, int], AbstractContextManager[Group]]
