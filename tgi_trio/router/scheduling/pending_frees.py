"""Sequences that the shard is told to drop: named in a FILTER, gone when it is acknowledged.

Until then a step may still read and write their blocks, so they keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tgi_trio.router.scheduling.sequence import Sequence


class PendingFrees:
    """LEAVING and PREEMPTED sequences and the FILTERs that name them."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._unnamed: list[Sequence] = []  # to be named in the next FILTER
        self._sent: deque[tuple[int, list[Sequence]]] = deque()  # (command number, named in it)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._members

    @property
    def members(self) -> Iterable[Sequence]:
        """Everyone who is on the way out."""
        return self._members.values()

    @property
    def owe_filter(self) -> bool:
        """Whether someone is still to be named."""
        if self._unnamed:
            # One that has ended by itself meanwhile is unknown to the shard.
            self._unnamed = [s for s in self._unnamed if s.id in self._members]
        return bool(self._unnamed)

    def add(self, sequence: Sequence) -> None:
        """`sequence` is to be dropped by the shard."""
        self._members[sequence.id] = sequence
        self._unnamed.append(sequence)

    def name(self, number: int) -> list[int]:
        """Return the sequence ids for the FILTER with this command number."""
        named, self._unnamed = self._unnamed, []
        self._sent.append((number, named))
        return [sequence.id for sequence in named]

    def discard(self, sequence: Sequence) -> bool:
        """`sequence` has ended by itself on the shard; returns whether it was on the way out."""
        return self._members.pop(sequence.id, None) is not None

    def acknowledge(self, number: int) -> list[Sequence]:
        """Commands up to `number` are applied: return who is gone now."""
        gone: list[Sequence] = []
        while self._sent and self._sent[0][0] <= number:
            # Ids are not named twice while their first FILTER is out, so membership is enough to
            # tell who ended by itself before the FILTER came.
            gone += [s for s in self._sent.popleft()[1] if self.discard(s)]
        return gone

    def clear(self) -> None:
        """Forget everybody: the shard is gone."""
        self._members.clear()
        self._unnamed.clear()
        self._sent.clear()

    def check(self) -> None:
        """Raise AssertionError when someone waits for a FILTER that nobody sends."""
        named = {s.id for s in self._unnamed}
        for _, group in self._sent:
            named |= {s.id for s in group}
        if not self._members.keys() <= named:
            raise AssertionError(f"{sorted(self._members.keys() - named)} are never named")
