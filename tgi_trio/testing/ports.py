"""Reserves a port for a server that is yet to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a loopback port that is reserved for a server of ours until the block is left.

    The port stays bound by a socket that does not listen. Linux lets a server that sets
    SO_REUSEADDR, as ours do, bind it as well, but does not choose it for those that bind any free
    port, nor as the local port of a connection. A port that is merely found free is often taken
    before the server starts, if other servers start at the same time.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
