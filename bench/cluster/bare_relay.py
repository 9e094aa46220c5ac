"""A relay that only copies bytes: what a program in Python cannot do a token for less than.

    python -m bench.cluster.bare_relay --port 3100 --to 3000

No routing, no parsing, no ids, no trio: one epoll set, a `recv` and a `send` for each piece. The
benchmark of the front runs it beside the front, since what a token costs from caches that have gone
cold differs from machine to machine.
"""

from __future__ import annotations

import argparse
import selectors
import socket
from typing import Final

_RECEIVE: Final = 1 << 16


def relay(port: int, to: int) -> None:
    """Accept connections and copy both ways, until the process is ended."""
    with (
        socket.create_server(("127.0.0.1", port), backlog=512) as listener,
        selectors.EpollSelector() as selector,
    ):
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    client, _ = listener.accept()
                    _pair(selector, client, socket.create_connection(("127.0.0.1", to)))
                else:
                    _copy(selector, *key.data)


def _pair(selector: selectors.BaseSelector, one: socket.socket, other: socket.socket) -> None:
    for mine, peer in ((one, other), (other, one)):
        mine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(mine, selectors.EVENT_READ, (mine, peer))


def _copy(selector: selectors.BaseSelector, source: socket.socket, peer: socket.socket) -> None:
    if source.fileno() < 0:
        return  # closed with its peer, in this very look
    try:
        data = source.recv(_RECEIVE)
        if data:
            peer.sendall(data)
            return
    except ConnectionError:
        pass  # as if it had ended
    for each in (source, peer):
        selector.unregister(each)
        each.close()


def main() -> None:
    """Relay."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True, help="port of the server")
    options = parser.parse_args()
    relay(options.port, options.to)


if __name__ == "__main__":
    main()
