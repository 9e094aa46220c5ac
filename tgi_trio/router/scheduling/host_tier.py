"""The second tier of the prefix cache: what is evicted, copied to the host's memory of the shard.

A block that the prefix cache evicts is copied out of the device, and copied back once a prompt has
the same tokens up to there. So are snapshots of recurrent states, in a tier of their own. Copies
are kept by digests (`block_digests.py`), so they need not form a tree: those behind one that is
gone are of no use, and go as they become the least recently used.

The shard makes all copies in the order of their orders. So a block may be granted, and a place be
reused, as soon as the order that reads it is given; who is granted a block waits in the shard until
its copies are done. A shard that dies takes its host memory along.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as ListLike

from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling.block_digests import Origin
from tgi_trio.router.scheduling.blocks import BlockAllocator


class HostTier:
    """The places of the host's memory, whose copies they hold, and the orders not given yet."""

    def __init__(self, places: int, *, states: bool = False) -> None:
        """`places`: blocks that the host's memory holds, or (`states`) slots of states.

        Raises ValueError for less than one.
        """
        self._states = states
        self._allocator = BlockAllocator(places)
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by digest, next to be reused first
        self._origins: dict[bytes, Origin] = {}  # of those of which it is known
        self._orders: list[Transfer] = []

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def held(self) -> int:
        """Blocks of which there is a copy."""
        return len(self._places)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def count_held(self, digests: ListLike[bytes], first: int) -> int:
        """Return of how many blocks in a row there are copies, from the `first` digest on."""
        places, at = self._places, first
        while at < len(digests) and digests[at] in places:
            at += 1
        return at - first

    def touch(self, digests: ListLike[bytes]) -> None:
        """Have the copies of a run, as many as there are, be the last to be reused."""
        for digest in reversed(digests):
            if digest in self._places:
                self._places.move_to_end(digest)

    def copy_out(
        self, digests: ListLike[bytes], blocks: ListLike[int], origins: ListLike[Origin] = ()
    ) -> None:
        """Have a run of evicted blocks copied out, those that begin it first of all.

        They become the most recently used, and the end of the run the first of them to be reused.
        """
        most = self._allocator.free + len(self._places)  # places from which nobody copies back
        for digest, block in zip(reversed(digests[:most]), reversed(blocks[:most]), strict=True):
            if digest in self._places:  # it was copied back, and is still there
                self._places.move_to_end(digest)
                continue
            if not self._allocator.free:
                gone, place = self._places.popitem(last=False)
                self._origins.pop(gone, None)
                self._allocator.give([place])
            (place,) = self._allocator.take(1)
            self._places[digest] = place
            self._orders.append(Transfer(block, place, back=False, states=self._states))
        self._origins.update(
            (digest, origin)
            for digest, origin in zip(digests, origins, strict=False)
            if digest in self._places
        )

    def place_of(self, digest: bytes) -> int | None:
        """Return where the copy of a block is; None: there is none."""
        return self._places.get(digest)

    def recent(self) -> Iterator[tuple[bytes, Origin, int]]:
        """Yield the copies whose origin is known, most recently used first, with their places."""
        for digest, place in reversed(self._places.items()):
            if (origin := self._origins.get(digest)) is not None:
                yield digest, origin, place

    def restore(self, digests: ListLike[bytes], origins: ListLike[Origin] = ()) -> None:
        """Take copies that a new shard has in the first places, the most recently used first.

        Raises ValueError if any place is in use, or there are too few.
        """
        places = self._allocator.take(len(digests))
        if places != list(range(1, len(digests) + 1)):
            raise ValueError("copies can only be restored into empty memory")
        self._places.update(zip(reversed(digests), reversed(places), strict=True))
        self._origins.update(zip(digests, origins, strict=False))

    def reserve(self, digests: ListLike[bytes]) -> list[int]:
        """Return the places of copies, which are not reused before `copy_back` is told of them."""
        return [self._places.pop(digest) for digest in digests]

    def copy_back(
        self, digests: ListLike[bytes], places: ListLike[int], blocks: ListLike[int]
    ) -> None:
        """Have a run of reserved copies copied back to `blocks`.

        Their places are the first to be reused, beginning at the end of the run: the device has the
        same. Until then, evicting these blocks costs no copy.
        """
        for digest, place, block in zip(digests, places, blocks, strict=True):
            self._orders.append(Transfer(block, place, back=True, states=self._states))
            self._places[digest] = place
            self._places.move_to_end(digest, last=False)

    def take_orders(self) -> list[Transfer]:
        """Return the copies to be made, in order, once."""
        orders, self._orders = self._orders, []
        return orders

    def clear(self) -> None:
        """Forget all copies; for a shard that has died."""
        self.__init__(self.total, states=self._states)  # type: ignore[misc]

    def check(self) -> None:
        """Raise AssertionError unless every place is free or holds one copy."""
        owned = set(self._places.values())
        if len(owned) != len(self._places):
            raise AssertionError("a place holds two copies")
        if not self._origins.keys() <= self._places.keys():
            raise AssertionError("it is known of what there was a copy")
        self._allocator.check(owned)
