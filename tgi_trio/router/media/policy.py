"""Which URLs of media are fetched, and which addresses connected to: nothing internal.

A server that fetches clients' URLs is a way into its network (server-side request forgery,
CVE-2025-6242 in vLLM's fetcher). So a name is resolved once, all of its addresses must be publicly
reachable, and only those are connected to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from tgi_trio.errors import ConfigurationError, ValidationError

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

_PORTS: Final = {"http": 80, "https": 443}
_NAT64: Final = IPv6Network("64:ff9b::/96")  # RFC 6052: the last four bytes are an IPv4 address
_HOST: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ALLOWED: Final = "--image-urls: none, public, or host names, networks and ports"


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched; `parse_policy` makes it from the flag."""

    enabled: bool = True
    hosts: frozenset[str] = frozenset()  # the only allowed ones, in lower case; empty: any
    networks: tuple[IPNetwork, ...] = ()  # allowed although they are not public
    ports: frozenset[int] = field(default_factory=lambda: frozenset(_PORTS.values()))

    def check_url(self, url: str) -> Target:
        """Return the target of a URL. Raises ValidationError if it must not be fetched."""
        if not self.enabled:
            raise ValidationError(
                "images are not fetched here (--image-urls none): send a data URL, "
                "data:image/png;base64,..."
            )
        target = _parse_url(url)
        if self.hosts and target.host.lower().rstrip(".") not in self.hosts:
            listed = ", ".join(sorted(self.hosts))
            raise ValidationError(
                f"images are not fetched from {target.host}, only from {listed} (--image-urls)"
            )
        if target.port not in self.ports:
            listed = ", ".join(map(str, sorted(self.ports)))
            raise ValidationError(
                f"images are not fetched from port {target.port}, only from {listed} (--image-urls)"
            )
        return target

    def allows(self, address: IPAddress) -> bool:
        """Return whether an address may be connected to."""
        inner = _embedded_ipv4(address)
        if inner is not None:
            return self.allows(inner)
        if any(address.version == each.version and address in each for each in self.networks):
            return True
        # Reserved: IPv6's ::127.0.0.1 and the like, which Python calls global.
        outside = address.is_multicast or address.is_reserved or _is_site_local(address)
        return address.is_global and not outside


@dataclass(frozen=True, slots=True)
class Target:
    """The resource of a URL, and its host."""

    url: str
    host: str  # a name in ASCII, or an address without brackets
    port: int
    tls: bool
    path: str  # with the query, in ASCII

    @property
    def host_header(self) -> str:
        """The host for HTTP's header, with the port unless it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == _PORTS["https" if self.tls else "http"]
        return host if usual else f"{host}:{self.port}"


def parse_policy(text: str) -> FetchPolicy:
    """Return the policy for `--image-urls`.

    `none`, or a list with commas: `public`, host names (then only these), networks such as
    10.1.0.0/16 that are allowed although they are not public, ports such as :8080 in addition to 80
    and 443. Raises ConfigurationError.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return FetchPolicy(enabled=False)
    hosts, networks, ports = set(), [], set(_PORTS.values())
    for word in words:
        if word == "public":
            continue
        if word.startswith(":"):
            ports.add(_parse_port(word))
        elif "/" in word:
            networks.append(_parse_network(word))
        elif word != "none" and _HOST.fullmatch(word.lower()):
            hosts.add(word.lower())
        else:
            raise ConfigurationError(f"{word!r} is not allowed ({_ALLOWED})")
    return FetchPolicy(True, frozenset(hosts), tuple(networks), frozenset(ports))


def _parse_port(word: str) -> int:
    digits = word[1:]
    if digits.isascii() and digits.isdecimal() and 0 < int(digits) < 65536:
        return int(digits)
    raise ConfigurationError(f"{word!r} is not a port ({_ALLOWED})")


def _parse_network(word: str) -> IPNetwork:
    try:
        return ip_network(word)
    except ValueError as error:
        raise ConfigurationError(f"{word!r} is not a network: {error} ({_ALLOWED})") from error


def _parse_url(url: str) -> Target:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or _PORTS.get(parts.scheme, 0)
        # As it is registered. Fails for a name with an empty or too long part.
        host = host.encode("idna").decode("ascii")
    except ValueError as error:  # UnicodeError is a subclass
        raise ValidationError(f"invalid image URL: {error}") from error
    if parts.scheme not in _PORTS:
        raise ValidationError(
            f"images are fetched over http and https, not {parts.scheme or 'without a scheme'}"
        )
    if not host:
        raise ValidationError("invalid image URL: it names no host")
    if parts.username is not None or parts.password is not None:
        raise ValidationError("invalid image URL: it must not hold a user or a password")
    if "%" in host:  # fe80::1%eth0
        raise ValidationError("invalid image URL: an address must not name an interface")
    return Target(url, host, port, parts.scheme == "https", _request_path(parts))


def _request_path(parts: SplitResult) -> str:
    """Return path and query for a request line, with blanks and non-ASCII characters escaped."""
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]|")
    return f"{path}?{query}" if query else path


def _embedded_ipv4(address: IPAddress) -> IPv4Address | None:
    """Return the IPv4 address to which an IPv6 address leads, if any."""
    if not isinstance(address, IPv6Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _is_site_local(address: IPAddress) -> bool:
    return isinstance(address, IPv6Address) and address.is_site_local


def parse_resolved(text: str) -> IPAddress:
    """Return an address from a resolver without its interface's name. Raises ValueError."""
    return ip_address(text.partition("%")[0])
