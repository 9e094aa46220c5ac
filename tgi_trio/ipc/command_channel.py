"""The router's interface to the channel to rank 0, over shared memory or TCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CommandChannel(Protocol):
    """The upper end of a channel: commands out, steps in, each in order.

    Implemented by `router_end.RouterEnd` over shared memory, and by `tcp_router_end.TcpRouterEnd`
    to another machine.
    """

    @property
    def try_receive(self) -> Callable[[], memoryview | None]:
        """Return the next frame, valid until `release`; None if there is none."""
        ...

    @property
    def release(self) -> Callable[[], None]: ...

    @property
    def describe_peer(self) -> Callable[[], str]:
        """Return who is at the other end and in which phase, for error messages."""
        ...

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Send a frame; returns False if there is no room now. Never blocks."""
        ...

    async def send(self, payload: bytes | memoryview, timeout: float) -> None:
        """Send a frame. Raises RingFull if there is no room for it within `timeout` seconds."""
        ...

    async def wait(self) -> None:
        """Return when there may be a frame to receive."""
        ...
