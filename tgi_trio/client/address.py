"""Addresses of servers, and connections to them."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

from tgi_trio.process.name_lookups import connect_by_name

_PORTS = {"http": 80, "https": 443}
_PATH = re.compile(r"[!-~]*")  # as it is sent: other letters are written as %C3%A9 is
_EXPECTED = "expected http://host:port, https://host:port, host:port or unix:/path"


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
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:  # a bracket that is not closed, or a port that is none
        raise ValueError(_EXPECTED) from None
    unused = parts.username is not None or parts.query or parts.fragment
    if not host or unused or parts.scheme not in _PORTS or not _PATH.fullmatch(parts.path):
        raise ValueError(_EXPECTED)
    secure = parts.scheme == "https"
    return Address(host, port or _PORTS[parts.scheme], parts.path.rstrip("/"), secure)


async def connect(address: Address) -> trio.abc.Stream:
    """Open a connection.

    Raises OSError that names the address, and trio.BrokenResourceError for a failed handshake.
    """
    try:
        stream = await _open(address)
    except OSError as error:
        raise OSError(f"{address}: {_why(error)}") from error
    if not address.tls:
        return stream
    secured = trio.SSLStream(
        stream,
        ssl.create_default_context(),
        server_hostname=address.host,
        https_compatible=True,
    )
    try:
        await secured.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return secured


async def _open(address: Address) -> trio.SocketStream:
    if address.unix:
        return await trio.open_unix_socket(address.unix)
    return await connect_by_name(address.host, address.port)


def _why(error: BaseException) -> str:
    """Return why there is no connection: of several attempts, what each has met."""
    if error.__cause__ is not None:
        return _why(error.__cause__)
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(_why, error.exceptions)))
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return (isinstance(error, OSError) and error.strerror) or str(error)  # a resolver's number
