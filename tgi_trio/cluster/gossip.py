"""The datagrams in which fronts tell each other which request went to which replica.

They are hints: a lost datagram costs a prefix hit, so none is acknowledged or sent again. Each is
complete in itself, small enough not to be fragmented, and signed with the cluster's secret. One
with a wrong signature or another version is dropped whole.

Layout: SIGNATURE_BYTES of keyed BLAKE2b over the rest; a version byte; SENDER_BYTES, random, by
which a front recognises its own datagrams; items. An item is a length byte and a replica's name, a
count byte and that many hashes of HASH_BYTES.
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
DATAGRAM_BYTES: Final = 1200  # fits IPv6's minimum MTU
MOST_ITEMS: Final = 4096  # queued at most; then the oldest are dropped
LONGEST_NAME: Final = 255  # bytes of a replica's name


class RoutedRequest(NamedTuple):
    """One item: a request with this prefix chain went to this replica."""

    replica: str
    chain: Chain


class Gossip(NamedTuple):
    """A decoded datagram."""

    sender: bytes
    items: list[RoutedRequest]


class Outbox:
    """Items until they are sent; bounded, so that memory stays bounded if nothing can be sent."""

    def __init__(self, secret: bytes, sender: bytes) -> None:
        """`sender`: SENDER_BYTES, unique to this front."""
        self._secret = secret
        self._head = bytes([VERSION]) + sender
        self._items: deque[bytes] = deque(maxlen=MOST_ITEMS)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: RoutedRequest) -> None:
        """Queue an item. Raises ValueError for a name of more than `LONGEST_NAME` bytes."""
        name = item.replica.encode()
        if len(name) > LONGEST_NAME:
            raise ValueError(f"a replica's name has {len(name)} bytes; {LONGEST_NAME} are the most")
        self._items.append(
            b"".join((bytes([len(name)]), name, bytes([len(item.chain)]), *item.chain))
        )

    def datagrams(self) -> Iterator[bytes]:
        """Yield all queued items in as few datagrams as they fit; leaves the queue empty."""
        room = DATAGRAM_BYTES - SIGNATURE_BYTES
        while self._items:
            body = bytearray(self._head)
            while self._items and len(body) + len(self._items[0]) <= room:
                body += self._items.popleft()
            yield _sign(body, self._secret) + body


def read(datagram: bytes, secret: bytes) -> Gossip:
    """Decode a datagram. Raises ValueError if it is not signed, of our version and complete."""
    signature, body = datagram[:SIGNATURE_BYTES], datagram[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(body, secret)):
        raise ValueError("a datagram is not signed with the cluster's secret")
    if body[:1] != bytes([VERSION]):
        raise ValueError(f"a datagram is not of version {VERSION}")
    try:
        return Gossip(_cut(body, 1, SENDER_BYTES), list(_decode(body, 1 + SENDER_BYTES)))
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("a datagram ends in the middle of an item") from error


def _sign(body: bytes | bytearray, secret: bytes) -> bytes:
    # BLAKE2b takes keys of at most 64 bytes; the secret may be longer.
    key = blake2b(secret, digest_size=32).digest()
    return blake2b(body, key=key, digest_size=SIGNATURE_BYTES).digest()


def _decode(body: bytes, at: int) -> Iterable[RoutedRequest]:
    while at < len(body):
        name = _cut(body, at + 1, body[at])
        at += 1 + len(name)
        hashes = _cut(body, at + 1, body[at] * HASH_BYTES)
        at += 1 + len(hashes)
        starts = range(0, len(hashes), HASH_BYTES)
        yield RoutedRequest(
            name.decode(), tuple(hashes[start : start + HASH_BYTES] for start in starts)
        )


def _cut(body: bytes, at: int, length: int) -> bytes:
    if at + length > len(body):
        raise IndexError(at + length)
    return body[at : at + length]
