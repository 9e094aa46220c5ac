"""What fronts tell each other, as datagrams: which requests went where, and how busy replicas are.

Hints, nothing more: a datagram that is lost costs a prefix hit, so none is sent again or answered.
Each stands for itself, is small enough not to be cut into pieces on its way, and is signed with the
cluster's secret; what is not, or is of another version, is dropped whole.

A datagram is SIGNATURE_BYTES of keyed BLAKE2b over the rest, a byte of version, and items. An item
is a byte of kind, a byte of length and a replica's name, then of a request a byte of how many
hashes and the hashes; of a load three unsigned 32-bit numbers, little-endian.
"""

from __future__ import annotations

import hmac
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

from tgi_trio.cluster.prefix_chain import HASH_BYTES, Chain

VERSION: Final = 1
SIGNATURE_BYTES: Final = 16
DATAGRAM_BYTES: Final = 1200  # fits wherever IPv6 does
MOST_ITEMS: Final = 4096  # that wait to be sent; the oldest are forgotten

_SENT: Final = 1
_LOAD: Final = 2
_LOADS: Final = struct.Struct("<III")


class Sent(NamedTuple):
    """A request went to a replica."""

    replica: str
    chain: Chain


class Load(NamedTuple):
    """What a replica said of itself: requests, and how many it runs at once."""

    replica: str
    running: int
    waiting: int
    slots: int


Item: TypeAlias = Sent | Load


class Outbox:
    """News until they are sent; bounded, since a front that nobody hears must not grow."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._items: deque[bytes] = deque(maxlen=MOST_ITEMS)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Have an item sent; ValueError for a replica's name of more than 255 bytes."""
        self._items.append(_encode(item))

    def datagrams(self) -> Iterator[bytes]:
        """Yield what waits, in as few datagrams as it fits; afterwards nothing waits."""
        room = DATAGRAM_BYTES - SIGNATURE_BYTES
        while self._items:
            body = bytearray([VERSION])
            while self._items and len(body) + len(self._items[0]) <= room:
                body += self._items.popleft()
            yield _sign(body, self._secret) + body


def read(datagram: bytes, secret: bytes) -> list[Item]:
    """Return a datagram's items; ValueError where it is not ours, or not whole."""
    signature, body = datagram[:SIGNATURE_BYTES], datagram[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(body, secret)):
        raise ValueError("a datagram is not signed with the cluster's secret")
    if body[:1] != bytes([VERSION]):
        raise ValueError(f"a datagram is not of version {VERSION}")
    try:
        return list(_decode(body))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError("a datagram ends in the middle of an item") from error


def _sign(body: bytes | bytearray, secret: bytes) -> bytes:
    # A key may have 64 bytes; a secret is a line of a file and may be longer.
    key = blake2b(secret, digest_size=32).digest()
    return blake2b(body, key=key, digest_size=SIGNATURE_BYTES).digest()


def _encode(item: Item) -> bytes:
    name = item.replica.encode()
    if len(name) > 255:
        raise ValueError(f"a replica's name has {len(name)} bytes; 255 are the most")
    match item:
        case Sent(chain=chain):
            return bytes([_SENT, len(name), *name, len(chain)]) + b"".join(chain)
        case Load(running=running, waiting=waiting, slots=slots):
            return bytes([_LOAD, len(name), *name]) + _LOADS.pack(running, waiting, slots)


def _decode(body: bytes) -> Iterable[Item]:
    at = 1
    while at < len(body):
        kind, length = body[at], body[at + 1]
        at += 2
        name = _cut(body, at, length).decode()
        at += length
        if kind == _SENT:
            hashes = _cut(body, at + 1, body[at] * HASH_BYTES)
            at += 1 + len(hashes)
            starts = range(0, len(hashes), HASH_BYTES)
            yield Sent(name, tuple(hashes[start : start + HASH_BYTES] for start in starts))
        elif kind == _LOAD:
            yield Load(name, *_LOADS.unpack_from(body, at))
            at += _LOADS.size
        else:
            raise IndexError(kind)


def _cut(body: bytes, at: int, length: int) -> bytes:
    if at + length > len(body):
        raise IndexError(at + length)
    return body[at : at + length]
