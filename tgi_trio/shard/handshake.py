"""The exchange of HELLO, by which both ends check that they have the same wire format."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.startup import decode_hello

HELLO_S = 30.0  # timeout for the other end's HELLO
_LOOK_S = 1.0


class Receiver(Protocol):
    """The part of a channel's end that waits for a frame."""

    @property
    def try_receive(self) -> Callable[[], memoryview | None]: ...
    @property
    def release(self) -> Callable[[], None]: ...
    def wait(self, timeout: float | None) -> bool: ...


def expect_hello(end: Receiver, peer: str) -> None:
    """Wait for the first frame of `peer`. Raises ProtocolMismatch unless it is a matching HELLO."""
    deadline = time.monotonic() + HELLO_S
    while (view := end.try_receive()) is None:
        if time.monotonic() > deadline:
            raise ProtocolMismatch(peer, f"it has not said HELLO for {HELLO_S:g} s")
        end.wait(_LOOK_S)
    decode_hello(Frame(view), peer)
    del view
    end.release()
