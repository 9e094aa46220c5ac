"""The interface of a shard group to the supervisor, wherever its ranks run.

`local_group.LocalGroup` implements it: its ranks are child processes of this one or run on other
machines. Control pages, descriptors and other things of one machine do not appear in the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.startup import WarmupRequest


class Group(Protocol):
    """The running shards of one incarnation, which live and die together."""

    @property
    def end(self) -> CommandChannel:
        """The router's end of the channel to rank 0: commands out, steps in."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def pids(self) -> Sequence[int]:
        """Process ids, in rank order, of the ranks on this machine."""
        ...

    def vitals(self, rank: int) -> Vitals:
        """Return a rank's last heartbeat, phase and step."""
        ...

    def describe(self, rank: int) -> str:
        """Return a rank's number, process and phase, for error messages."""
        ...

    async def wait_for_death(self) -> None:
        """Return when one of the ranks has died."""
        ...

    async def pump_output(self) -> None:
        """Log what the ranks print until they have closed their output."""
        ...

    async def end_all(self, patient: bool) -> str:
        """End every rank and wait for it; returns the reports of those that had died by themselves.

        Of all ranks if none had. `patient`: give a crashing rank time to exit by itself.
        """
        ...


class Rank(Protocol):
    """One rank of a group: a `ShardInstance` of this machine, or a `RemoteRank`."""

    @property
    def pid(self) -> int | None:
        """Its process id; None if it runs on another machine."""
        ...

    @property
    def vitals(self) -> Vitals: ...

    def describe(self) -> str: ...

    async def wait_for_death(self) -> None:
        """Return when it has died; `pump_output` has to be running."""
        ...

    async def wait_for_end(self) -> None:
        """Return when its process has ended; without `pump_output` beside it."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def kill(self) -> None:
        """Kill it; harmless if it has ended."""
        ...

    async def finish(self) -> str:
        """Wait until it has ended and return the report of its end."""
        ...

    async def pump_output(self) -> None: ...


# Called once per incarnation with what the KV cache is sized for and the incarnation's number;
# leaving the context ends the group.
StartGroup = Callable[[WarmupRequest, int], AbstractContextManager[Group]]
