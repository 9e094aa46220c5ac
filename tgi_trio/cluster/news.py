"""What fronts tell each other, as datagrams: which requests went where.

Hints, nothing more: a datagram that is lost costs a prefix hit, so none is sent again or answered.
Each stands for itself, is small enough not to be cut into pieces on its way, and is signed with the
cluster's secret; what is not, or is of another version, is dropped whole.

A datagram is SIGNATURE_BYTES of keyed BLAKE2b over the rest, a byte of version, SENDER_BYTES of
chance by which a front knows what it has sent itself, and items. An item is a byte of length and a
replica's name, a byte of how many hashes and the hashes.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

from tgi_trio.cluster.prefix_chain import HASH_BYTES, Chain

VERSION: Final = 2
SIGNATURE_BYTES: Final = 16
SENDER_BYTES: Final = 8
DATAGRAM_BYTES: Final = 1200  # fits wherever IPv6 does
MOST_ITEMS: Final = 4096  # that wait to be sent; the oldest are forgotten
LONGEST_NAME: Final = 255  # bytes of a replica's


class Sent(NamedTuple):
    """A request went to a replica."""

    replica: str
    chain: Chain


class Heard(NamedTuple):
    """One datagram."""

    sender: bytes
    items: list[Sent]


class Outbox:
    """News until they are sent; bounded, since a front that nobody hears must not grow."""

    def __init__(self, secret: bytes, sender: bytes) -> None:
        """`sender`: SENDER_BYTES that no other front has."""
        self._secret = secret
        self._head = bytes([VERSION]) + sender
        self._items: deque[bytes] = deque(maxlen=MOST_ITEMS)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Sent) -> None:
        """Have an item sent; ValueError for a replica's name of more than `LONGEST_NAME` bytes."""
        name = item.replica.encode()
        if len(name) > LONGEST_NAME:
            raise ValueError(f"a replica's name has {len(name)} bytes; {LONGEST_NAME} are the most")
        self._items.append(
            b"".join((bytes([len(name)]), name, bytes([len(item.chain)]), *item.chain))
        )

    def datagrams(self) -> Iterator[bytes]:
        """Yield what waits, in as few datagrams as it fits; afterwards nothing waits."""
        room = DATAGRAM_BYTES - SIGNATURE_BYTES
        while self._items:
            body = bytearray(self._head)
            while self._items and len(body) + len(self._items[0]) <= room:
                body += self._items.popleft()
            yield _sign(body, self._secret) + body


def read(datagram: bytes, secret: bytes) -> Heard:
    """Return what a datagram says; ValueError where it is not ours, or not whole."""
    signature, body = datagram[:SIGNATURE_BYTES], datagram[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(body, secret)):
        raise ValueError("a datagram is not signed with the cluster's secret")
    if body[:1] != bytes([VERSION]):
        raise ValueError(f"a datagram is not of version {VERSION}")
    try:
        return Heard(_cut(body, 1, SENDER_BYTES), list(_decode(body, 1 + SENDER_BYTES)))
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("a datagram ends in the middle of an item") from error


def _sign(body: bytes | bytearray, secret: bytes) -> bytes:
    # A key may have 64 bytes; a secret is a line of a file and may be longer.
    key = blake2b(secret, digest_size=32).digest()
    return blake2b(body, key=key, digest_size=SIGNATURE_BYTES).digest()


def _decode(body: bytes, at: int) -> Iterable[Sent]:
    while at < len(body):
        name = _cut(body, at + 1, body[at])
        at += 1 + len(name)
        hashes = _cut(body, at + 1, body[at] * HASH_BYTES)
        at += 1 + len(hashes)
        starts = range(0, len(hashes), HASH_BYTES)
        yield Sent(name.decode(), tuple(hashes[start : start + HASH_BYTES] for start in starts))


def _cut(body: bytes, at: int, length: int) -> bytes:
    if at + length > len(body):
        raise IndexError(at + length)
    return body[at : at + length]
