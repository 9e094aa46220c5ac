"""Broadcasts rank 0's plan of the next step to the followers, through a ring for each of them.

A ring each rather than one for all: at the size of commands waking readers costs more than copying,
and a follower that dies stalls only its own ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class PlanEnd(Protocol):
    """Rank 0's end to a follower: a `channel.LeaderEnd`, or a `tcp.TcpEnd` to another machine."""

    @property
    def incarnation(self) -> int: ...
    @property
    def describe_peer(self) -> Callable[[], str]: ...
    @property
    def try_receive(self) -> Callable[[], memoryview | None]: ...
    @property
    def release(self) -> Callable[[], None]: ...
    def wait(self, timeout: float | None) -> bool: ...
    def reserve(self, size: int) -> memoryview: ...
    def commit(self) -> None: ...
    def send(self, payload: bytes | memoryview) -> None: ...
    @property
    def max_payload(self) -> int: ...
    @property
    def try_send(self) -> Callable[[bytes | memoryview], bool]: ...


class Broadcast:
    """The leader's ends to all followers, in rank order."""

    def __init__(self, ends: Sequence[PlanEnd]) -> None:
        """`ends`: to all followers; whoever owns them closes them."""
        self.ends = tuple(ends)
        self._most = min((end.max_payload for end in self.ends), default=0)

    def send(self, payload: bytes | memoryview) -> None:
        """Send `payload` to every follower. Raises RingFull or PeerGone as their ends do.

        All copies are made before the first follower is woken: waking a core takes longer than
        copying a command. One that does not fit into a ring in one piece goes to one after the
        other.
        """
        if len(payload) > self._most:
            for end in self.ends:
                end.send(payload)
            return
        for end in self.ends:
            end.reserve(len(payload))[:] = payload
        for end in self.ends:
            end.commit()
