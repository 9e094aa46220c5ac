"""What the router needs of the way to rank 0, whatever carries the frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CommandChannel(Protocol):
    """The upper end of a channel: commands down, steps up, in order.

    `router_end.RouterEnd` is one, over shared memory, `tcp_router_end.TcpRouterEnd` one to another
    machine.
    """

    @property
    def try_receive(self) -> Callable[[], memoryview | None]:
        """The next frame, valid until `release`; None when there is none."""
        ...

    @property
    def release(self) -> Callable[[], None]: ...

    @property
    def describe_peer(self) -> Callable[[], str]:
        """Who is at the other end, and what it does, for error messages."""
        ...

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Send a frame; False when there is no room now. Never blocks."""
        ...

    async def send(self, payload: bytes | memoryview, timeout: float) -> None:
        """Send a frame, waiting `timeout` seconds for room at most; raises RingFull then."""
        ...

    async def wait(self) -> None:
        """Return when there may be a frame to receive."""
        ...
