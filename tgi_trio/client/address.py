"""Addresses of servers, and connections to them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: a host and a port, or a Unix socket."""

    host: str
    port: int = 0
    prefix: str = ""  # prefix of every path, if a proxy adds one
    tls: bool = False
    unix: str = ""  # path of the socket; host is then only a name

    def __str__(self) -> str:
        if self.unix:
            return f"unix:{self.unix}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_address(text: str) -> Address:
    """Return the address `http://host:port/prefix`, `https://...`, `host:port` or `unix:/path`.

    Raises ValueError that says what is allowed.
    """
    if text.startswith("unix:/"):
        return Address("localhost", unix=text.removeprefix("unix:"))
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise ValueError("expected http://host:port, https://host:port, host:port or unix:/path")
    return Address(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")


async def connect(address: Address) -> trio.abc.Stream:
    """Open a connection. Raises OSError, and trio.BrokenResourceError for a failed handshake."""
    if address.unix:
        return await trio.open_unix_socket(address.unix)
    if not address.tls:
        return await trio.open_tcp_stream(address.host, address.port)
    context = ssl.create_default_context()
    stream = await trio.open_ssl_over_tcp_stream(
        address.host, address.port, ssl_context=context, https_compatible=True
    )
    await stream.do_handshake()
    return stream
