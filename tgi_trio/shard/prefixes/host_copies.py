"""The contract of a backend that keeps copies of blocks and snapshots in the host's memory.

`loop/transfers.py` gives the orders; no torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import NamedTuple, Protocol

from tgi_trio.ipc.transfers import Transfer


class HostCopies(Protocol):
    """The host's memory, on all of a runner's ranks; of the caches that `warm_up` allocates."""

    @property
    def done(self) -> int:
        """How many launches are over, which end in order. Never waits."""
        ...

    def launch(self, transfers: ListLike[Transfer]) -> None:
        """Begin to make copies, in this order, after the steps launched so far."""
        ...

    def finish(self) -> None:
        """Wait for the end of all launches."""
        ...


class Batch(NamedTuple):
    """Copies that can be made at once: of one kind, in one direction, no item or place twice."""

    items: list[int]
    places: list[int]
    back: bool
    states: bool


def split_transfers(transfers: ListLike[Transfer], most: int) -> Iterator[Batch]:
    """Yield transfers in batches of at most `most`, which are to be made one after the other."""
    batch = Batch([], [], False, False)
    items, places = set[int](), set[int]()
    for item, place, back, states in transfers:
        alike = (batch.back, batch.states) == (back, states)
        if not alike or len(items) == most or item in items or place in places:
            if items:
                yield batch
            batch = Batch([], [], back, states)
            items.clear()
            places.clear()
        batch.items.append(item)
        batch.places.append(place)
        items.add(item)
        places.add(place)
    if items:
        yield batch
