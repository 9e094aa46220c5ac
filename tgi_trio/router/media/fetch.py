"""Fetches media over HTTP as the policy allows, with limits on bytes, time and redirects."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urljoin

import h11
import trio

from tgi_trio.errors import ValidationError
from tgi_trio.media.image_text import size_error
from tgi_trio.process.name_lookups import NameThreads
from tgi_trio.router.media.policy import FetchPolicy, IPAddress, Target, parse_resolved

_CHUNK: Final = 65536
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class Resolve(Protocol):
    """Resolves a name. It is called once for each hop, and only its addresses are connected to."""

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host`, best first. Raises OSError."""


class SystemResolver:
    """Resolves names as the system does, in threads of its own."""

    def __init__(self) -> None:
        self._threads = NameThreads()

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host`, best first. Raises OSError."""
        found = await self._threads.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits for fetching one image, video or sound."""

    max_image_fetch_size: int = 20 * 2**20  # bytes
    seconds: float = 5.0  # in total, including redirects and name resolution
    redirects: int = 3


class MediaFetcher:
    """Fetches media, without cookies, credentials, and proxies of the environment."""

    def __init__(
        self,
        policy: FetchPolicy,
        limits: FetchLimits,
        resolve: Resolve | None = None,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        """`resolve`: None: as the system does."""
        self._policy = policy
        self._limits = limits
        self._resolve = SystemResolver() if resolve is None else resolve
        self._tls = tls

    async def fetch(self, url: str, take: Callable[[int], object] = lambda count: None) -> bytes:
        """Return the bytes at an http or https URL; `take` is called with the size of each piece.

        Raises ValidationError. Its text contains no address, so as not to reveal the internal
        network.
        """
        with trio.move_on_after(self._limits.seconds):
            for _ in range(self._limits.redirects + 1):
                found = await self._request(self._policy.check_url(url), take)
                if isinstance(found, bytes):
                    return found
                url = found.url
            raise ValidationError(
                f"Could not fetch image: more than {self._limits.redirects} redirects"
            )
        raise ValidationError(
            f"Could not fetch image: it took more than {self._limits.seconds:g} s"
        )

    async def _request(self, target: Target, take: Callable[[int], object]) -> bytes | _Redirect:
        """Return the answer of one hop."""
        try:
            stream = await self._connect(target)
            try:
                return await self._exchange(stream, target, take)
            finally:
                await trio.aclose_forcefully(stream)
        except (OSError, trio.BrokenResourceError, ssl.SSLError) as error:
            raise ValidationError(f"Could not fetch image: {_describe(error)}") from error
        except h11.RemoteProtocolError as error:
            raise ValidationError(
                f"Could not fetch image: the answer is not HTTP: {error}"
            ) from error

    async def _connect(self, target: Target) -> trio.abc.Stream:
        """Connect to the first address that accepts. Raises what `_request` handles."""
        stream = await self._dial(await self._look_up(target), target.port)
        if not target.tls:
            return stream
        secured = trio.SSLStream(
            stream, self._tls(), server_hostname=target.host, https_compatible=True
        )
        try:
            await secured.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secured

    async def _look_up(self, target: Target) -> list[IPAddress]:
        """Return a host's addresses. Raises ValidationError if any of them is not allowed.

        The others are refused as well, since such a name was made to reach the internal one.
        """
        try:
            found = [parse_resolved(each) for each in await self._resolve(target.host, target.port)]
        except (OSError, ValueError, UnicodeError) as error:
            raise ValidationError(
                f"Could not fetch image: no address of {target.host} is known"
            ) from error
        if not all(map(self._policy.allows, found)):
            raise ValidationError(
                f"Could not fetch image: {target.host} is not at a public address "
                "(--image-urls allows networks)"
            )
        return found

    async def _dial(self, addresses: list[IPAddress], port: int) -> trio.abc.Stream:
        for address in addresses:
            with suppress(OSError):  # trio's error would contain the address
                return await trio.open_tcp_stream(str(address), port)
        raise ConnectionError(errno.ECONNREFUSED, "no connection could be made")

    async def _exchange(
        self, stream: trio.abc.Stream, target: Target, take: Callable[[int], object]
    ) -> bytes | _Redirect:
        """Request the image and read it, up to its limit."""
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("host", target.host_header),
            ("accept", "image/*, video/*, audio/*"),
            ("accept-encoding", "identity"),
            ("user-agent", "tgi-trio"),
            ("connection", "close"),
        ]
        request = h11.Request(method="GET", target=target.path, headers=headers)
        ask = (connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b"")
        await stream.send_all(ask)
        async with aclosing(_read_events(connection, stream)) as events:
            answer = await anext(events)
            if not isinstance(answer, h11.Response):
                raise ValidationError(
                    "Could not fetch image: the connection was closed without an answer"
                )
            moved = self._check_answer(answer, target)
            if moved is not None:
                return moved
            return await self._read_body(events, take)

    def _check_answer(self, answer: h11.Response, target: Target) -> _Redirect | None:
        """Return the new URL if the image has moved, otherwise None. Raises ValidationError."""
        headers = {name.lower(): value for name, value in answer.headers}
        if answer.status_code in _REDIRECTS and b"location" in headers:
            location = headers[b"location"].decode("ascii", "replace")
            try:
                return _Redirect(urljoin(target.url, location))
            except ValueError as error:
                raise ValidationError(
                    f"Could not fetch image: its redirect is not a URL: {error}"
                ) from error
        if answer.status_code != 200:
            raise ValidationError(
                f"Could not fetch image: {target.host} answered {answer.status_code}"
            )
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ValidationError(
                f"Could not fetch image: {target.host} sent it compressed, unasked"
            )
        size = int(headers.get(b"content-length", b"0"))  # h11 has checked that it is a number
        if size > self._limits.max_image_fetch_size:
            raise ValidationError(size_error(size, self._limits.max_image_fetch_size))
        return None

    async def _read_body(
        self, events: AsyncGenerator[h11.Event], take: Callable[[int], object]
    ) -> bytes:
        body = bytearray()
        most = self._limits.max_image_fetch_size
        async for event in events:
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > most:
                    raise ValidationError(size_error(most + 1, most))
                take(len(event.data))
        return bytes(body)


@dataclass(frozen=True, slots=True)
class _Redirect:
    """A new URL, to be checked like the first."""

    url: str


async def _read_events(
    connection: h11.Connection, stream: trio.abc.Stream
) -> AsyncGenerator[h11.Event]:
    """Yield the events of the server's answer, up to its end."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(_CHUNK)))
        elif isinstance(event, h11.InformationalResponse):
            continue
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            yield event
            return
        elif isinstance(event, h11.Event):
            yield event


def _describe(error: Exception) -> str:
    """Return what failed in the system's words, without an address."""
    cause = error.__cause__ or error  # trio has the reason as the cause of its own error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS failed: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed: {cause.reason}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "the connection broke"
