"""Copies of blocks that the prefix cache will evict next, so that evicting them takes no time.

Whoever is granted an evicted block waits in the shard for its copy. A sequence that grows must not:
its client is reading. So the blocks at the end of the cache are copied out before they are needed,
as many as are likely to be granted soon. And a prompt that would evict more than have been copied
waits in the queue until they have, while others in the batch generate: what was copied before is
left to these.

Cached blocks are never written again, so a copy stays right however long its block is used. No
batch of copies is ordered before the one before it is over, as the shard's reports tell: so other
copies never stand behind more than one such batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling.block_digests import Origin
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.prefix_cache import PrefixCache
from tgi_trio.router.scheduling.prefix_nodes import Match, Node
from tgi_trio.router.scheduling.sequence import NEVER
from tgi_trio.router.scheduling.state_memory import StateMemory

_AT_ONCE: Final = 1024  # blocks of a batch of copies

_Run: TypeAlias = tuple[list[bytes], list[int], list[Origin]]  # digests of blocks, blocks, origins


class CopiesAhead:
    """Which blocks have copies already, which are to have some, and which are on their way."""

    def __init__(
        self, tier: HostTier, cache: PrefixCache, states: StateMemory | None, most: int
    ) -> None:
        """`most`: blocks that are kept free or copied while no prompt waits for more."""
        self._tier = tier
        self._cache = cache
        self._states = states
        self._most = most
        self._sent = 0  # copies ordered of the shard, in any direction
        self._over = 0  # of those, as it reports
        self._flying: set[bytes] = set()  # digests of the batch that is not over
        self._until = 0  # copies after which it is over
        # What the first prompt that waits would evict, and what it would share.
        self._wanted: tuple[int, Match | None] = (0, None)
        self._short = NEVER  # blocks that are too many, as long as this batch is on its way

    def lags(self, match: Match | None, wanted: int, growing: int, free: int) -> bool:
        """Return whether a prompt has to wait until more blocks have been copied out.

        `wanted`: blocks that it would be granted beside those of `match`; `growing`: blocks that
        others will be granted soon; `free`: that need no eviction.
        """
        evictable = self._cache.evictable - (match.evictable if match is not None else 0)
        wanted += min(growing, self._most) - free
        wanted = min(wanted, evictable, self._tier.total)
        if wanted <= 0:
            return False
        if wanted < self._short and self._count_clean(wanted, match) == wanted:
            return False
        if self._flying:
            self._short = min(self._short, wanted)
        elif not self._wanted[0]:  # those behind it in the queue have it served first
            self._wanted = wanted, match
        return True

    def order(self, wanted_soon: int, free: int) -> None:
        """Have the next batch copied out, if there is anything to copy and none is on its way.

        `wanted_soon`: blocks that are likely to be granted soon; `free`: that need no eviction.
        """
        (wanted, match), self._wanted = self._wanted, (0, None)
        wanted = max(wanted, min(wanted_soon, self._most) - free)
        if wanted <= 0 or self._flying:
            return
        tier, room = self._tier, _AT_ONCE
        runs: list[_Run] = []
        for node, keep in self._next_out(min(wanted, tier.total), match):
            digests, blocks = self._cache.digests_of(node)[keep:], node.blocks[keep:]
            first = len(digests)  # of those for which there is room; the end goes first
            while first and room:
                first -= 1
                room -= digests[first] not in tier
            origins = self._cache.origins_of(node, keep + first)
            runs.append((digests[first:], blocks[first:], origins))
            if not room:
                break
        if room == _AT_ONCE:
            return
        for digests, _, _ in runs:  # before any place is taken
            tier.touch(digests)
        for digests, blocks, origins in runs:
            self._flying.update(digest for digest in digests if digest not in tier)
            tier.copy_out(digests, blocks, origins)
            if self._states is not None:
                self._states.copy_out_idle(blocks)

    def take_orders(self) -> list[Transfer]:
        """Return all copies that the shard is to make, in order, once."""
        tiers = (self._tier, None if self._states is None else self._states.tier)
        transfers = [each for tier in tiers if tier is not None for each in tier.take_orders()]
        self._sent += len(transfers)
        if self._flying and not self._until:
            self._until = self._sent
        return transfers

    def note_over(self, count: int) -> None:
        """Note how many of all copies that were ordered are over."""
        self._over = count
        if count >= self._until:
            self._flying.clear()
            self._until, self._short = 0, NEVER

    def clear(self) -> None:
        """Forget everything, copies included; for a shard that has died."""
        self._tier.clear()
        self.__init__(self._tier, self._cache, self._states, self._most)  # type: ignore[misc]

    def _count_clean(self, most: int, spared: Match | None) -> int:
        """Return how many of the next blocks to go are copied, up to the first that is not."""
        found = 0
        for node, keep in self._next_out(most, spared):
            digests = self._cache.digests_of(node)[keep:]
            for digest in reversed(digests):
                if digest not in self._tier or digest in self._flying:
                    return found
                found += 1
        return found

    def _next_out(self, count: int, spared: Match | None) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of the next blocks to go, in order, and how many each would keep.

        `spared`: what stays.
        """
        path = set[Node]()
        node = None if spared is None else spared.node
        while node is not None:
            path.add(node)
            node = node.parent
        return self._cache.next_out(count, path)

    def check(self) -> None:
        """Raise AssertionError if copies, or what is on its way of them, are not in order."""
        self._tier.check()
        if not 0 <= self._over <= self._sent:
            raise AssertionError(f"{self._over} copies are over, {self._sent} were ordered")
        if bool(self._until) > bool(self._flying) or self._until > self._sent:
            raise AssertionError("a batch of copies is over, and nobody has noticed")
        if self._until and self._until <= self._over:
            raise AssertionError("a batch of copies is over, and counts as on its way")
        if len(self._flying) > _AT_ONCE:
            raise AssertionError(f"{len(self._flying)} blocks are copied out at once")
