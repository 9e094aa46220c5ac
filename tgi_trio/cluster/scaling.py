"""How many replicas are wanted: pure, told the time, between two bounds and patient both ways.

More are wanted when requests wait, or KV memory fills, for `up_after` seconds on end: a queue that
goes away by itself is no reason, since a replica takes longer to start than most queues last. Fewer
are wanted when the others could hold everything with room to spare for `down_after` seconds on end:
a replica that leaves takes its prefix cache with it. One comes or goes at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

FULL: Final = 0.8  # of KV memory, on average: more replicas
ROOMY: Final = 0.5  # of the others' KV memory, if one were gone: fewer
UP_AFTER_S: Final = 30.0
DOWN_AFTER_S: Final = 600.0


class ReplicaLoad(NamedTuple):
    """How busy one replica is."""

    waiting: int  # requests in its queue
    running: int  # sequences in its batch
    kv_used: float  # part of its KV memory that requests hold, 0 to 1; cached prefixes are free


@dataclass
class Scaling:
    """Keeps `wanted` between `low` and `high`; ValueError where they are no bounds."""

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
        """The bounds, as they are written."""
        return f"{self.low}:{self.high}"

    def observe(self, now: float, loads: Collection[ReplicaLoad]) -> int:
        """Take the loads of the replicas that serve; return how many replicas are wanted.

        While fewer serve than are wanted nothing is concluded: those that start will help.
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
        self._busy_since = self._idle_since = None  # what comes of it is to be seen first
