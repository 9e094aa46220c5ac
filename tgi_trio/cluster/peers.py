"""Other fronts by name: where they are now, looked up again for as long as this one runs.

A name may have many addresses, such as that of a headless Service of Kubernetes, which has all
fronts and among them this one; and fronts that start anew have others.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

import trio

from tgi_trio.cluster.feed import Address
from tgi_trio.errors import ConfigurationError

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0  # between two looks
_PATIENCE: Final = 5.0  # seconds for the names' server


def split_peer(text: str, flag: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[host]:port`.

    Raises ConfigurationError, which names the `flag`.
    """
    host, _, port = text.rpartition(":")
    named = bool(host) and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    if not (named and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigurationError(f"{flag}: expected host:port or [host]:port, got {text!r}")
    return host.strip("[]"), int(port)


def bind_feed(address: str) -> socket.socket:
    """Return a socket of UDP bound to `host:port`. Raises ConfigurationError."""
    host, port = split_peer(address, "--peer-bind")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        one = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"--peer-bind {address} cannot be used: {error}") from error
    try:
        one.bind(where)
    except OSError as error:
        one.close()
        raise ConfigurationError(f"--peer-bind {address} cannot be used: {error}") from error
    return one


async def follow_peers(
    peers: Sequence[Address],
    family: int,
    take: Callable[[tuple[Address, ...]], None],
    seconds: float = LOOK_SECONDS,
) -> None:
    """Give `take` the addresses of the `peers`, names and ports, until cancelled.

    `family`: AF_INET or AF_INET6, as the feed's socket has it. A name that has none now is one that
    may have some later: it is warned of once, until it is found.
    """
    missing: set[Address] = set()
    while True:
        found: dict[Address, None] = {}
        for peer in peers:
            addresses = await _look_up(peer, family)
            found.update(dict.fromkeys(addresses))
            if not addresses and peer not in missing:
                log.warning("no front is found by the name %s yet (--peer)", peer[0])
            (missing.discard if addresses else missing.add)(peer)
        take(tuple(found))
        await trio.sleep(seconds)


async def _look_up(peer: Address, family: int) -> list[Address]:
    host, port = peer
    with trio.move_on_after(_PATIENCE):
        try:
            found = await trio.socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
        except OSError:
            return []
        return [(str(where[0]), int(where[1])) for *_, where in found]
    return []
