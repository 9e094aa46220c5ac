"""Looks up the addresses of the other fronts by name, again and again.

A name may have many addresses: that of a headless Service in Kubernetes has those of all fronts,
this one included. They change when fronts are restarted.
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

LOOK_SECONDS: Final = 10.0  # between two look-ups
_PATIENCE: Final = 5.0  # timeout of a look-up, seconds


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
    """Return a UDP socket bound to `host:port`. Raises ConfigurationError."""
    host, port = split_peer(address, "--peer-bind")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        one = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{host!r} can be no name of a host"
        raise ConfigurationError(f"--peer-bind {address} cannot be used: {why}") from error
    try:
        one.bind(where)
    except OSError as error:
        one.close()
        raise ConfigurationError(
            f"--peer-bind {address} cannot be used: {error.strerror}"
        ) from error
    return one


async def follow_peers(
    peers: Sequence[Address],
    family: int,
    take: Callable[[tuple[Address, ...]], None],
    seconds: float = LOOK_SECONDS,
) -> None:
    """Look up the `peers` (name, port) every `seconds` and give `take` the addresses.

    Runs until cancelled. `family`: that of the feed's socket, AF_INET or AF_INET6. A name without
    an address may have one later: there is one warning until it is found.
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
        except (OSError, UnicodeError):  # the latter of what can be no name
            return []
        return [(str(where[0]), int(where[1])) for *_, where in found]
    return []
