"""Rank 0 tells its followers what the next step is: one ring per follower, all of them at once.

One ring each, not one ring for all: at command sizes the wake-ups cost more than the copies, and a
follower that dies stalls only its own ring.
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
    @property
    def try_send(self) -> Callable[[bytes | memoryview], bool]: ...


class Broadcast:
    """The leader's ends to all followers, in rank order."""

    def __init__(self, ends: Sequence[PlanEnd]) -> None:
        """Use `ends` from now on; their owner closes them."""
        self.ends = tuple(ends)

    def send(self, payload: bytes | memoryview) -> None:
        """Give every follower `payload`; raises RingFull or PeerGone as its end does.

        All frames are published before the first bell rings: waking a core takes longer than
        copying a command, and an awake follower should not wait for its neighbour's bell.
        """
        for end in self.ends:
            end.reserve(len(payload))[:] = payload
        for end in self.ends:
            end.commit()
