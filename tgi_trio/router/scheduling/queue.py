"""Sequences that wait to be sent to the shard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from tgi_trio.router.scheduling.sequence import Sequence

Key: TypeAlias = tuple[int, int, int]


class WaitingQueue:
    """Waiting sequences in the order in which they are to be admitted.

    That order is: priority (lower is sooner); then those that were on the shard before (pushed out
    or lost with it), in the order of their first admission; then arrival. Someone reads the former
    as a stream, so they go before anyone who has not seen a token.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []  # parallel to _sequences; sorted, no two alike
        self._sequences: list[Sequence] = []
        self.tokens = 0  # known tokens of all waiting sequences
        self.version = 0  # changes with every change

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @staticmethod
    def key(sequence: Sequence) -> Key:
        """Return what a sequence is sorted by."""
        if sequence.order:
            return (sequence.priority, 0, sequence.order)
        return (sequence.priority, 1, sequence.arrival)

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` where it belongs."""
        key = self.key(sequence)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)
        self.tokens += sequence.length
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out; raises KeyError when it is not here."""
        at = bisect_left(self._keys, self.key(sequence))
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise KeyError(sequence.id)
        del self._keys[at], self._sequences[at]
        self.tokens -= sequence.length
        self.version += 1

    def at(self, index: int) -> Sequence:
        """Return the sequence at `index` from the front."""
        return self._sequences[index]

    def check(self) -> None:
        """Raise AssertionError when order or accounting is wrong."""
        keys = [self.key(sequence) for sequence in self._sequences]
        if keys != self._keys or any(a >= b for a, b in pairwise(keys)):
            raise AssertionError("the queue is out of order")
        if self.tokens != sum(sequence.length for sequence in self._sequences):
            raise AssertionError("queued tokens are miscounted")
