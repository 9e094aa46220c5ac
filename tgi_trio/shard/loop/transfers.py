"""Copies of cached blocks between device and host, made beside the steps, and who waits for them.

The router orders a copy before it grants the block anew. No step waits for one: a sequence that is
granted a block, or a slot of states, whose copy is not over sits steps out until it is, and blocks
that are added to a sequence are added then. All others go on. No torch in this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from typing import Final, TypeAlias

from tgi_trio.ipc.messages import ExtendRow, PrefillRow
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.shard.prefixes.host_copies import HostCopies

_AT_ONCE: Final = 256  # copies launched between two steps: launching takes the host's time
_IN_FLIGHT: Final = 3  # launches that are not over: a further one might make the host wait
_MOST: Final = 512  # launches that are ordered; more come only of prompts that are given up at once

_Item: TypeAlias = tuple[bool, int]  # whether it is a slot of states, and its number


class Transfers:
    """Copies that are ordered, in launches that are numbered from 1 on."""

    def __init__(self, copies: HostCopies | None) -> None:
        """`copies`: what makes them; None: none can be ordered."""
        self._copies = copies
        self.done = 0  # launches that are over, as far as `advance` has seen
        self.copied = 0  # copies of theirs
        self._launches: deque[ListLike[Transfer]] = deque()  # that are not over
        self._begun = 0  # launches that have been made
        self._last: dict[_Item, int] = {}  # the last launch that copies it, if that is not over
        self._sequences: dict[int, int] = {}  # that sit steps out, and until which launch is over
        self._extensions: deque[tuple[int, ExtendRow]] = deque()  # likewise, in order

    @property
    def is_busy(self) -> bool:
        """Whether any copy is not over, or blocks whose copies are over are still to be added."""
        return bool(self._launches or self._extensions)

    def order(self, transfers: ListLike[Transfer]) -> None:
        """Have copies made, in order; waits for those before if these are too many.

        Raises ValueError if nothing here can make any.
        """
        if self._copies is None:
            raise ValueError("this shard keeps no copies in the host's memory")
        if len(self._launches) > _MOST:
            self.finish()
        for start in range(0, len(transfers), _AT_ONCE):
            part = transfers[start : start + _AT_ONCE]
            self._launches.append(part)
            number = self.done + len(self._launches)
            self._last.update(((each.states, each.item), number) for each in part)

    def advance(self) -> None:
        """Launch the next copies, if any are left, and take note of those that are over."""
        copies = self._copies
        if copies is None or not self._launches:
            return
        flying = self._begun - self.done
        if flying < min(len(self._launches), _IN_FLIGHT):
            copies.launch(self._launches[flying])
            self._begun += 1
        self._settle(copies.done)

    def finish(self) -> None:
        """Wait for all copies that are ordered."""
        while self._launches and self._copies is not None:
            self.advance()
            if self._begun - self.done == min(len(self._launches), _IN_FLIGHT):
                self._copies.finish()

    def _settle(self, done: int) -> None:
        while self.done < done:
            self.done += 1
            launch = self._launches.popleft()
            self.copied += len(launch)
            for each in launch:
                item = (each.states, each.item)
                if self._last.get(item) == self.done:
                    del self._last[item]
        if not self._launches:
            self._sequences.clear()

    # --- who waits ----------------------------------------------------------------------------

    def delays(self, row: PrefillRow) -> bool:
        """Return whether a new sequence has to sit steps out, until it is no longer `in` this."""
        if not self._last:
            return False
        last = self._last_of(_items_of(row))
        if last:
            self._sequences[row.sequence] = last
        return last > 0

    def __contains__(self, sequence: int) -> bool:
        return self._sequences.get(sequence, 0) > self.done

    def delays_extension(self, row: ExtendRow) -> bool:
        """Return whether a sequence gets more blocks later, from `take_due`."""
        if not self._last and not self._extensions:
            return False
        last = self._last_of((False, block) for block in row.block_ids)
        # Blocks are added in the order in which they are granted.
        if not last and all(row.sequence != other.sequence for _, other in self._extensions):
            return False
        self._extensions.append((last, row))
        return True

    def take_due(self) -> Iterator[ExtendRow]:
        """Yield extensions that wait no longer, once."""
        while self._extensions and self._extensions[0][0] <= self.done:
            yield self._extensions.popleft()[1]

    def drop(self, sequence: int) -> None:
        """Forget a sequence. Copies of its blocks are made all the same: they are cached."""
        self._sequences.pop(sequence, None)
        if self._extensions:
            self._extensions = deque(
                each for each in self._extensions if each[1].sequence != sequence
            )

    def _last_of(self, items: Iterable[_Item]) -> int:
        """Return the launch that is the last of these to end; 0: all are over."""
        return max((self._last.get(item, 0) for item in items), default=0)


def _items_of(row: PrefillRow) -> Iterator[_Item]:
    """Yield what a row is granted."""
    yield from ((False, int(block)) for block in row.block_ids)
    if row.states is not None:
        slots = (*row.states.slots, row.states.source, *(slot for _, slot in row.states.saves))
        yield from ((True, slot) for slot in slots)
