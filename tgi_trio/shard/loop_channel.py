"""What a rank's loop needs of its end of a channel; `ipc.channel.ShardEnd` is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

BEAT_S = 1.0  # an idle shard shows life this often


class Writer(Protocol):
    """What the loop needs to know of its outgoing ring."""

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
        """Returns the next frame, u8, None when there is none; valid until `release` is called."""
        ...

    @property
    def release(self) -> Callable[[], None]:
        """Gives the bytes of the last frame back."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame may be there (True), or for `timeout` seconds at most (False).

        Raises PeerGone when the upper end has gone and everything it sent has been read.
        """
        ...

    def send(self, payload: bytes | memoryview) -> None:
        """Write a frame; waits where there is no room for it.

        Raises RingFull when none is made in time, PeerGone when the upper end goes meanwhile,
        ValueError for a frame that can never fit.
        """
        ...

    def beat(self, step: int, phase: int) -> None:
        """Show life: the number of the last step, a `Phase`."""
        ...
