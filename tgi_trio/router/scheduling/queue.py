"""The queue of sequences that wait to be sent to the shard."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.sequence import NEVER, Rank, Sequence
from tgi_trio.router.scheduling.ttft import TtftTarget

Key: TypeAlias = tuple[int, int, int]

_BEFORE_ALL = -(1 << 62)  # a priority before every other


class WaitingQueue:
    """Waiting sequences in the order in which they are to be admitted.

    The order: first those that are owed a turn, then by priority (lower goes first), then by
    `Rank`, then by arrival; sequences that were on the shard before are in the order in which they
    were first admitted.

    Sequences that are late (`TtftTarget`) come after those that can still be in time. Neither
    lateness nor priorities starve a sequence: after `patience` admissions more than it would have
    waited for in order of arrival, it is owed a turn. From then on it has the priority of those
    that have passed it, or their like would take its blocks again at once.
    """

    def __init__(self, limits: SchedulingLimits, ttft_target: TtftTarget) -> None:
        self._limits = limits
        self._ttft_target = ttft_target
        self._keys: list[Key] = []  # parallel to _sequences; sorted, no two alike
        self._sequences: list[Sequence] = []
        # In order of arrival, without those that are owed a turn: those that were on the shard
        # before, those that never were, and among the latter those that are in time.
        self._returning: OrderedDict[int, Sequence] = OrderedDict()
        self._patient: OrderedDict[int, Sequence] = OrderedDict()
        self._in_time: OrderedDict[int, Sequence] = OrderedDict()
        self._admissions = 0
        # Priorities of the last admissions: of all that can have passed one that is owed a turn.
        self._admitted: deque[int] = deque(maxlen=limits.patience)
        self.tokens = 0  # known tokens of all waiting sequences
        self.version = 0  # changes with every change

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @staticmethod
    def key(sequence: Sequence) -> Key:
        """Return a sequence's sort key."""
        rank = sequence.rank
        if rank is Rank.OWED:
            return (_BEFORE_ALL, rank, sequence.arrival)
        number = sequence.order if rank is Rank.RETURNING else sequence.arrival
        if rank is Rank.RETURNING and not sequence.order:
            number = sequence.arrival - NEVER  # resumed from another server: before all others
        return (sequence.priority, rank, number)

    def add(self, sequence: Sequence) -> None:
        """Insert `sequence` in order."""
        if sequence.order or sequence.emitted:
            sequence.rank = Rank.RETURNING
            sequence.turn = self._admissions  # in order of arrival it would be the next
            self._returning[sequence.id] = sequence
        else:
            sequence.turn = self._admissions + len(self._sequences)
            self._patient[sequence.id] = self._in_time[sequence.id] = sequence
        self._insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`. Raises KeyError if it is not here."""
        self._take(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        for waiting in (self._returning, self._patient, self._in_time):
            waiting.pop(sequence.id, None)

    def _take(self, sequence: Sequence) -> None:
        at = bisect_left(self._keys, self.key(sequence))
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise KeyError(sequence.id)
        del self._keys[at], self._sequences[at]
        self.tokens -= sequence.length
        self.version += 1

    def admit(self, sequence: Sequence) -> None:
        """Remove `sequence`, which is being admitted. Raises KeyError if it is not here."""
        self.remove(sequence)
        self._admissions += 1
        self._admitted.append(sequence.priority)

    def rank(self, now: float) -> None:
        """Re-rank the sequences that are late by now, or are owed a turn."""
        late = now - self._ttft_target.longest_wait
        while self._in_time and (first := next(iter(self._in_time.values()))).queued < late:
            del self._in_time[first.id]
            self._move(first, Rank.LATE)
        owed = self._admissions - self._limits.patience
        for waiting in (self._returning, self._patient):
            while waiting and (first := next(iter(waiting.values()))).turn < owed:
                self._move(first, Rank.OWED)

    def _insert(self, sequence: Sequence) -> None:
        key = self.key(sequence)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)
        self.tokens += sequence.length
        self.version += 1

    def _move(self, sequence: Sequence, rank: Rank) -> None:
        self._take(sequence)
        sequence.rank = rank
        if rank is Rank.OWED:
            self._forget(sequence)
            sequence.priority = min((sequence.priority, *self._admitted))
        self._insert(sequence)

    def check(self) -> None:
        """Raise AssertionError if order or accounting is wrong."""
        ranks = {s.id: s.rank for s in self._sequences}
        if self._patient.keys() != {id for id, rank in ranks.items() if rank >= Rank.IN_TIME}:
            raise AssertionError("turns are kept for others than those that may be passed")
        if self._returning.keys() != {id for id, rank in ranks.items() if rank is Rank.RETURNING}:
            raise AssertionError("others return than are said to")
        if self._in_time.keys() != {id for id, rank in ranks.items() if rank is Rank.IN_TIME}:
            raise AssertionError("others are in time than are said to be")
        keys = [self.key(sequence) for sequence in self._sequences]
        if keys != self._keys or any(a >= b for a, b in pairwise(keys)):
            raise AssertionError("the queue is out of order")
        if self.tokens != sum(sequence.length for sequence in self._sequences):
            raise AssertionError("queued tokens are miscounted")
