"""A request's prefix chain: hashes of growing prefixes of its prompt.

Two prompts with a common prefix have chains with a common prefix, as long as what a replica's
prefix cache could reuse. Prompts are not tokenised here. Their bytes in the JSON body are a good
enough key, since a client serialises the earlier turns of a conversation the same way each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, TypeAlias

Chain: TypeAlias = tuple[bytes, ...]  # hashes of growing prefixes, the shortest first

HASH_BYTES: Final = 8

# (up to this many bytes of the prompt, a hash every so many bytes). Later parts are larger, which
# keeps chains short (LONGEST at most), so that a routing decision takes microseconds.
_STEPS: Final = (
    (4 << 10, 256),
    (16 << 10, 1 << 10),
    (64 << 10, 4 << 10),
    (256 << 10, 16 << 10),
)

# The keys of prompts in all APIs. A quote within a JSON string is escaped as `\"`, so a key's name
# in quotes within a prompt does not match.
_PROMPT: Final = re.compile(rb'"(?:messages|inputs|prompt|input|system|instructions|tools)"\s*:')


def _ends() -> Iterator[int]:
    end = 0
    for limit, step in _STEPS:
        while end < limit:
            end += step
            yield end


_ENDS: Final = tuple(_ends())  # bytes of the prompt that each hash covers
LONGEST: Final = len(_ENDS)


def make_prefix_chain(body: bytes | bytearray | memoryview) -> Chain:
    """Return the chain of a request's JSON body; empty if the prompt is shorter than 256 bytes.

    Hashing starts at the first key of a prompt, so that sampling parameters before it make no
    difference. In a body without such a key it starts at the beginning.
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
        chain.append(whole.digest())  # of all bytes so far; the hash can be updated further
        start = end
    return tuple(chain)
