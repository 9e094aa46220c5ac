"""Digests that name a block of a prefix without the blocks before it.

Each covers the tokens of its block and, by the digest before it, everything that comes before: 32
bytes of BLAKE2b, of which nobody finds two that are equal.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

_BYTES = 32


class Origin(NamedTuple):
    """What a block with a digest was computed for."""

    namespace: tuple[int, str]
    before: bytes  # what stands before it: a digest
    tokens: bytes  # its own, int32 ids; negative ones are of images


def begin_digests(namespace: tuple[int, str]) -> bytes:
    """Return what stands before the first block of a namespace (adapter, cache salt)."""
    adapter, salt = namespace
    return _digest(f"{adapter} {salt}".encode("utf-8", "surrogatepass"))


def extend_digests(
    digests: list[bytes], before: bytes, key: bytes, block_bytes: int, most: int | None = None
) -> None:
    """Append the digests of those whole blocks of `key` that `digests` lacks, from its end on.

    `before`: what stands before the first block; `block_bytes`: of a block's tokens; `most`: blocks
    of `key` that count.
    """
    last = digests[-1] if digests else before
    end = len(key) if most is None else min(most * block_bytes, len(key))
    for start in range(len(digests) * block_bytes, end - block_bytes + 1, block_bytes):
        last = _digest(last + key[start : start + block_bytes])
        digests.append(last)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
