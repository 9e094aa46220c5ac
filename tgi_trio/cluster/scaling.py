"""Autoscaling: decides how many replicas are wanted, between two bounds. Pure: it is told the time.

One more is wanted once requests have queued, or KV memory has been nearly full, for `up_after`
seconds without a break: a replica takes longer to start than most queues last. One fewer is wanted
once the others could have held everything, with room to spare, for `down_after` seconds without a
break: a replica that stops takes its prefix cache with it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

FULL: Final = 0.8  # mean share of KV memory in use above which one more is wanted
ROOMY: Final = 0.5  # share of the others' KV memory, were one gone, below which one fewer is
UP_AFTER_S: Final = 30.0
DOWN_AFTER_S: Final = 600.0


class ReplicaLoad(NamedTuple):
    """One replica's load."""

    waiting: int  # requests in its queue
    running: int  # sequences in its batch
    kv_used: float  # share of KV memory that requests hold, 0 to 1; cached prefixes count as free


@dataclass
class Scaling:
    """Keeps `wanted` between `low` and `high`. Raises ValueError unless 1 <= low <= high."""

    low: int
    high: int
    up_after: float = UP_AFTER_S
    down_after: float = DOWN_AFTER_S

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"replicas must be LOW:HIGH with 1 <= LOW <= HIGH, not {self.text}")
        self.wanted = self.low
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    @property
    def text(self) -> str:
        """The bounds, as a flag gives them."""
        return f"{self.low}:{self.high}"

    def observe(self, now: float, loads: Collection[ReplicaLoad]) -> int:
        """Take the loads of the serving replicas; return how many replicas are wanted.

        The number does not change while fewer serve than are wanted: some are still starting.
        """
        if len(loads) < self.wanted:
            self._busy_since = self._idle_since = None
            return self.wanted
        self._busy_since = self._since(self._busy_since, now, self._busy(loads))
        self._idle_since = self._since(self._idle_since, now, self._idle(loads))
        if self._lasted(self._busy_since, now, self.up_after) and self.wanted < self.high:
            self._want(self.wanted + 1)
        elif self._lasted(self._idle_since, now, self.down_after) and self.wanted > self.low:
            self._want(self.wanted - 1)
        return self.wanted

    @staticmethod
    def _busy(loads: Collection[ReplicaLoad]) -> bool:
        waiting = sum(load.waiting for load in loads)
        return waiting >= len(loads) or sum(load.kv_used for load in loads) > FULL * len(loads)

    @staticmethod
    def _idle(loads: Collection[ReplicaLoad]) -> bool:
        waiting = sum(load.waiting for load in loads)
        return not waiting and sum(load.kv_used for load in loads) < ROOMY * (len(loads) - 1)

    @staticmethod
    def _since(since: float | None, now: float, holds: bool) -> float | None:
        return (now if since is None else since) if holds else None

    @staticmethod
    def _lasted(since: float | None, now: float, seconds: float) -> bool:
        return since is not None and now - since >= seconds

    def _want(self, count: int) -> None:
        self.wanted = count
        self._busy_since = self._idle_since = None  # see the effect before changing it again
