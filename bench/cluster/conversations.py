"""Conversations of several turns, each turn's prompt beginning with the turns before it.

Applications give their conversations a system prompt; few of them have most of the users (Zipf).
A prompt is counted in parts of PART_TOKENS; a part is a head of a prefix chain and what a replica's
cache keeps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from tgi_trio.cluster.prefix_chain import Chain

PART_TOKENS: Final = 256
THINK_S: Final = 8.0  # between an answer and the next turn, on average
TURNS: Final = (2, 8)
SYSTEM_PARTS: Final = (2, 8)


@dataclass(slots=True)
class Conversation:
    """One user's; a turn adds one part: an answer of some 200 tokens, and the next question."""

    chain: Chain
    number: int
    turns: int  # that are left
    arrived: float = 0.0  # when the present turn did
    front: int = 0  # to which it came

    def extend(self) -> None:
        """Go on with the next turn."""
        self.turns -= 1
        self.chain = (*self.chain, b"c%d.%d" % (self.number, len(self.chain)))


@dataclass
class Conversations:
    """Begins them, `applications` being how many differ in their system prompts."""

    draw: random.Random
    applications: int
    begun: int = 0
    _popularity: list[float] = field(init=False)
    _prompts: list[Chain] = field(init=False)

    def __post_init__(self) -> None:
        count = self.applications
        self._popularity = list(accumulate(1 / (rank + 1) for rank in range(count)))
        self._prompts = [
            tuple(b"s%d.%d" % (one, part) for part in range(self.draw.randint(*SYSTEM_PARTS)))
            for one in range(count)
        ]

    def begin(self) -> Conversation:
        """Return a new conversation before its first turn is answered."""
        self.begun += 1
        (prompt,) = self.draw.choices(self._prompts, cum_weights=self._popularity)
        chain = (*prompt, b"c%d.%d" % (self.begun, len(prompt)))
        return Conversation(chain, self.begun, self.draw.randint(*TURNS))
