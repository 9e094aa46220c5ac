"""A port for a server that is yet to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of loopback that is kept for a server of ours until the block is left.

    The port stays bound, by a socket that does not listen. Linux lets a server bind beside it that
    sets SO_REUSEADDR, as ours do, but gives the port to nobody who asks for any free one, and to
    no connection as its own end. A port that is only found free is often taken when the server
    comes, if others start servers too.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
