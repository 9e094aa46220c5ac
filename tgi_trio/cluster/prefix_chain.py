"""A request's prefix chain: one hash for each part of its prompt, from its beginning on.

Two requests whose prompts begin alike have chains that begin alike, and where the longer common
part ends the replica's prefix cache ends as well. Prompts are not tokenised here: their bytes as
the body spells them are near enough, for a client spells the turns of a conversation alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, TypeAlias

Chain: TypeAlias = tuple[bytes, ...]  # hashes of growing prefixes, the shortest first

HASH_BYTES: Final = 8

# Up to so many bytes of a prompt, a hash every so many. Far from the beginning parts are larger:
# a chain stays short enough for a decision to take microseconds, and is never longer than LONGEST.
_STEPS: Final = (
    (4 << 10, 256),
    (16 << 10, 1 << 10),
    (64 << 10, 4 << 10),
    (256 << 10, 16 << 10),
)

# What a prompt is made of, in every dialect. A quote within a string is written `\"`, so text in
# which such a word stands in quotes is not found.
_PROMPT: Final = re.compile(rb'"(?:messages|inputs|prompt|input|system|instructions|tools)"\s*:')


def _ends() -> Iterator[int]:
    end = 0
    for limit, step in _STEPS:
        while end < limit:
            end += step
            yield end


_ENDS: Final = tuple(_ends())  # bytes of a prompt that each hash covers
LONGEST: Final = len(_ENDS)


def prefix_chain(body: bytes | bytearray | memoryview) -> Chain:
    """Return the chain of a request's JSON body; empty for a prompt of less than 256 bytes.

    The prompt begins at the first key that holds a part of one, so that what is said of sampling
    before it does not tell conversations apart. A body without such a key counts from its start.
    """
    found = _PROMPT.search(body)
    prompt = memoryview(body)[found.start() if found else 0 :]
    whole = blake2b(digest_size=HASH_BYTES)
    chain: list[bytes] = []
    start = 0
    for end in _ENDS:
        if end > len(prompt):
            break
        whole.update(prompt[start:end])
        chain.append(whole.digest())  # of all bytes up to here; the hash goes on
        start = end
    return tuple(chain)
