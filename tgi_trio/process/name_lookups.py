"""Looks names up in threads that nothing else waits for, and connects to hosts by name.

A name whose servers do not answer takes half a minute, and its thread goes on after everybody has
given it up. Among trio's own threads, which all else shares, such names would take every one.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import trio

from tgi_trio.process.threads import run_in_thread

MOST: Final = 128  # threads of all names
MOST_OF_ONE: Final = 2  # threads of one name, which takes no more from the others


async def connect_by_name(host: str, port: int) -> trio.SocketStream:
    """Connect to a host by its name or address. Raises OSError, also for what can be no name.

    Of a name with an empty part, or one of more than 63 letters, Python and trio raise UnicodeError
    instead: whoever calls again until somebody answers would end for a mistake in an address.
    """
    try:
        return await trio.open_tcp_stream(host, port)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} can be no name of a host") from None


class NameThreads(trio.abc.HostnameResolver):
    """Resolves names as the system does; for `trio.socket.set_custom_hostname_resolver`, too."""

    def __init__(self) -> None:
        self._all = trio.CapacityLimiter(MOST)
        # Of names that are being looked up.
        self._of_one: WeakValueDictionary[bytes | str | None, trio.CapacityLimiter] = (
            WeakValueDictionary()
        )

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """Return what `socket.getaddrinfo` does. Raises OSError, and UnicodeError for no name."""
        own = self._of_one.get(host)
        if own is None:
            own = self._of_one[host] = trio.CapacityLimiter(MOST_OF_ONE)
        look_up = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        limits = cast(trio.CapacityLimiter, _BothLimits(own, self._all))
        return await run_in_thread(look_up, limits)

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        """Return what `socket.getnameinfo` does. Raises OSError."""
        look_up = partial(socket.getnameinfo, sockaddr, flags)
        return await run_in_thread(look_up, self._all)


@dataclass(frozen=True, slots=True)
class _BothLimits:
    """Places in two limiters, as `trio.to_thread` takes and gives back places in one."""

    own: trio.CapacityLimiter
    all: trio.CapacityLimiter

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self.own.acquire_on_behalf_of(borrower)
        try:
            await self.all.acquire_on_behalf_of(borrower)
        except BaseException:
            self.own.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self.all.release_on_behalf_of(borrower)
        self.own.release_on_behalf_of(borrower)
