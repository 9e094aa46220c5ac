"""When sequences have to end: a priority queue with lazy deletion."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

_FEWEST: Final = 64  # entries that are never looked through


class Deadlines:
    """Deadlines of sequences, the earliest first.

    A sequence that ends stays here until it is the earliest or the entries have doubled. Without
    the latter, those that end long before a late deadline would stay for as long as others with an
    early one come and go.
    """

    def __init__(self, is_listening: Callable[[int], bool]) -> None:
        """`is_listening`: whether a sequence's client still wants tokens."""
        self._is_listening = is_listening
        self._heap: list[tuple[float, int]] = []
        self._most = _FEWEST  # entries at which the ended ones are removed

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, sequence_id: int) -> None:
        """Note the deadline, in seconds of the scheduler's clock, of a sequence that comes."""
        if len(self._heap) >= self._most:
            self._heap = [each for each in self._heap if self._is_listening(each[1])]
            heapify(self._heap)
            self._most = max(_FEWEST, 2 * len(self._heap))
        heappush(self._heap, (deadline, sequence_id))

    @property
    def earliest(self) -> float | None:
        """The earliest deadline of a sequence that has not ended; None without any."""
        heap = self._heap
        while heap:
            if self._is_listening(heap[0][1]):
                return heap[0][0]
            heappop(heap)
        return None

    def take(self, now: float) -> int | None:
        """Remove and return the sequence whose deadline is the earliest, if it has passed."""
        earliest = self.earliest
        return None if earliest is None or earliest > now else heappop(self._heap)[1]

    def check(self, ids: set[int]) -> None:
        """Raise AssertionError unless `ids`, all that have a deadline and listen, are here."""
        found = [each for _, each in self._heap]
        if not ids <= set(found) or len(set(found)) != len(found):
            raise AssertionError("a deadline is missing, or is here twice")
        if len(found) > self._most:
            raise AssertionError("more deadlines of ended sequences are kept than is allowed")
