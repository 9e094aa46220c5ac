"""The interface of a channel's lower end to a rank's loop; `ipc.channel.ShardEnd` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

BEAT_S = 1.0  # interval of an idle shard's heartbeats


class Writer(Protocol):
    """The loop's view of its outgoing ring."""

    @property
    def max_payload(self) -> int:
        """Bytes of the largest frame that ever fits."""
        ...


class Channel(Protocol):
    """The lower end of a channel."""

    @property
    def writer(self) -> Writer: ...

    @property
    def try_receive(self) -> Callable[[], memoryview | None]:
        """Return the next frame, u8, valid until `release`; None if there is none."""
        ...

    @property
    def release(self) -> Callable[[], None]:
        """Free the bytes of the last frame."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame may be there (True), or for `timeout` seconds at most (False).

        Raises PeerGone when the upper end is gone and everything that it sent has been read.
        """
        ...

    def send(self, payload: bytes | memoryview) -> None:
        """Write a frame, waiting for room if necessary.

        Raises RingFull if there is none in time, PeerGone if the upper end goes meanwhile, and
        ValueError for a frame that can never fit.
        """
        ...

    def beat(self, step: int, phase: int) -> None:
        """Send a heartbeat with the number of the last step and a `Phase`."""
        ...
