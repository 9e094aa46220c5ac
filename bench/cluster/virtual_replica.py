"""A replica that computes nothing: slots, a queue, a cache of prompt parts, and how long all takes.

Times are of an 8-billion-parameter model on one accelerator, roughly: 8,000 tokens of a prompt a
second, a token every 12 ms alone and less often in company.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from bench.cluster.conversations import PART_TOKENS, Conversation

PART_S: Final = PART_TOKENS / 8000  # to compute a part of a prompt
TOKEN_S: Final = 0.012
ANSWER_TOKENS: Final = 200
SERVICE_S: Final = ANSWER_TOKENS * TOKEN_S + 2.5 * PART_S  # of one request, roughly


class VirtualReplica:
    """Serves so many conversations at once and keeps so many parts, the latest used."""

    def __init__(self, name: str, slots: int, parts: int) -> None:
        self.name = name
        self.slots = slots
        self.parts = parts
        self.running = 0
        self.queue: deque[Conversation] = deque()
        self.served = 0
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    @property
    def load(self) -> int:
        """Requests that are here."""
        return self.running + len(self.queue)

    def start(self, one: Conversation, now: float) -> tuple[float, float, int]:
        """Begin with a request; returns when its first token and its end come, and parts found."""
        self.running += 1
        self.served += 1
        found = self._use(one)
        share = self.running / self.slots
        first = now + (len(one.chain) - found) * PART_S * (1 + share)
        return first, first + ANSWER_TOKENS * TOKEN_S * (0.7 + 0.3 * share), found

    def _use(self, one: Conversation) -> int:
        found = 0
        for part in one.chain:
            if part not in self._cached:
                break
            self._cached.move_to_end(part)
            found += 1
        for part in one.chain[found:]:
            self._cached[part] = None
        while len(self._cached) > self.parts:
            self._cached.popitem(last=False)
        return found
