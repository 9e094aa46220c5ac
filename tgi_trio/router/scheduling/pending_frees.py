"""Sequences that the shard is told to drop, from the decision until their FILTER is acknowledged.

Until then a step may still read and write their blocks, so they keep them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tgi_trio.router.scheduling.sequence import Sequence


class PendingFrees:
    """LEAVING and PREEMPTED sequences, and the FILTERs that name them."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._unnamed: list[Sequence] = []  # to be named in the next FILTER
        self._sent: deque[tuple[int, list[Sequence]]] = deque()  # (command number, named in it)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._members

    @property
    def members(self) -> Iterable[Sequence]:
        """All sequences that are being dropped."""
        return self._members.values()

    @property
    def owe_filter(self) -> bool:
        """Whether a sequence has not been named in a FILTER yet."""
        if self._unnamed:
            # The shard no longer knows those that have ended by themselves meanwhile.
            self._unnamed = [s for s in self._unnamed if s.id in self._members]
        return bool(self._unnamed)

    def add(self, sequence: Sequence) -> None:
        """Have the shard drop `sequence`."""
        self._members[sequence.id] = sequence
        self._unnamed.append(sequence)

    def name(self, number: int) -> list[int]:
        """Return the sequence ids for the FILTER with this command number."""
        named, self._unnamed = self._unnamed, []
        self._sent.append((number, named))
        return [sequence.id for sequence in named]

    def discard(self, sequence: Sequence) -> bool:
        """Note that `sequence` has ended by itself; returns whether it was being dropped."""
        return self._members.pop(sequence.id, None) is not None

    def acknowledge(self, number: int) -> list[Sequence]:
        """Return the sequences that the shard has dropped with the commands up to `number`."""
        gone: list[Sequence] = []
        while self._sent and self._sent[0][0] <= number:
            # An id is named in one FILTER at a time, so those no longer among the members have
            # ended by themselves before the FILTER arrived.
            gone += [s for s in self._sent.popleft()[1] if self.discard(s)]
        return gone

    def clear(self) -> None:
        """Forget all sequences; for a shard that has died."""
        self._members.clear()
        self._unnamed.clear()
        self._sent.clear()

    def check(self) -> None:
        """Raise AssertionError if a sequence waits for a FILTER that will not be sent."""
        named = {s.id for s in self._unnamed}
        for _, group in self._sent:
            named |= {s.id for s in group}
        if not self._members.keys() <= named:
            raise AssertionError(f"{sorted(self._members.keys() - named)} are never named")
