"""Paged KV memory: sequences' block tables, shared prefixes, and eviction.

Every block has exactly one owner: the free list, one sequence, or the prefix cache. A sequence's
block table begins with `shared` blocks of the cache, which its pin protects from eviction; the rest
is its own. If the model has recurrent states, their slots are granted and freed with the blocks
(`state_memory.py`): K and V of a whole cached prefix are shared, but computation starts at the last
block that has a snapshot of the states. Copies of evicted blocks may be kept in the host's memory
(`host_tier.py`), behind which a prompt is continued as behind cached ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling import kept_prefixes
from tgi_trio.router.scheduling.blocks import BlockAllocator
from tgi_trio.router.scheduling.copies_ahead import CopiesAhead
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.kept_prefixes import Budget, Collected, KeptPrefixes
from tgi_trio.router.scheduling.prefix_cache import TOKEN_BYTES, PrefixCache
from tgi_trio.router.scheduling.prefix_nodes import Match
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.scheduling.state_memory import StateMemory


class KvMemory:
    """Grants blocks to sequences, shares computed ones, and takes them back."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        caching: bool,
        state_slots: int = 0,
        host_blocks: int = 0,
        host_slots: int = 0,
        most_ahead: int = 0,
    ) -> None:
        """`state_slots`: slots that can be granted; 0: the model has no recurrent states.

        `host_blocks`, `host_slots`: copies that the host's memory holds, of blocks and of
        snapshots; 0: none are kept. `most_ahead`: blocks that are copied before they have to go,
        while no prompt waits for more.
        """
        self.tier = HostTier(host_blocks) if host_blocks and caching else None
        slots = host_slots if self.tier is not None else 0
        self.states = StateMemory(state_slots, block_size, slots) if state_slots else None
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._caching = caching
        self._allocator = BlockAllocator(blocks)
        self._cache = PrefixCache(block_size, None if self.tier is None else self.tier.copy_out)
        self._ahead: CopiesAhead | None = None
        if self.tier is not None:
            self._ahead = CopiesAhead(self.tier, self._cache, self.states, most_ahead)
        self._unloaded: set[int] = set()  # unloaded adapters whose prefixes are still pinned

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def cached(self) -> int:
        """Blocks of cached prefixes that can be evicted."""
        return self._cache.evictable

    @property
    def available(self) -> int:
        """Blocks that can be granted now."""
        return self._allocator.free + self._cache.evictable

    @property
    def held(self) -> int:
        """Blocks in use by sequences."""
        return self.total - self.available

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    # -- granting ------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Match | None:
        """Return the cached prefix of a waiting sequence; None if it must not use the cache."""
        if not self._caching or sequence.wants_prompt_logprobs:
            return None
        key = sequence.key = sequence.key or sequence.token_bytes()
        most = (sequence.length - 1) // self.block_size  # at least one token is computed
        match = self._cache.match(sequence.namespace, key, most)
        if self.tier is not None:
            digests = sequence.digest_blocks(self._block_bytes)
            match = self._find_copies(match, digests[:most], self.tier)
        if self.states is not None and not match.hosted and self.states.is_coming(match.blocks):
            return match._replace(claimed=True)
        return match

    def _find_copies(self, match: Match, digests: list[bytes], tier: HostTier) -> Match:
        """Return a match with the copies that continue it, as far as one can start behind them."""
        cached = len(match.blocks)
        end = cached + tier.count_held(digests, cached)
        if self.states is not None and end > cached:
            end = max(cached, self.states.usable(match.blocks, digests[:end]))
        return match._replace(digests=digests[:end], claimed=match.claimed and end == cached)

    def digest(self, sequence: Sequence, most: int) -> bool:
        """Compute up to `most` digests that `match` needs; returns whether all are there."""
        if self.tier is None or sequence.wants_prompt_logprobs:
            return True
        key = sequence.key = sequence.key or sequence.token_bytes()
        found = sequence.digest_blocks(self._block_bytes, len(sequence.digests) + most)
        return len(found) == len(key) // self._block_bytes

    def count_cached(self, match: Match | None) -> int:
        """Return how many tokens need not be computed thanks to `match`."""
        if match is None:
            return 0
        usable = len(match.blocks) + match.hosted
        if self.states is not None:
            usable = self.states.usable(match.blocks, match.digests)
        return usable * self.block_size

    @property
    def has_slots(self) -> bool:
        """Whether there are slots for the states of one more sequence."""
        return self.states is None or self.states.has_room

    def price(self, match: Match | None, tokens: int) -> int:
        """Return how many fewer blocks are `available` once a sequence of `tokens` is admitted.

        Blocks of `match` are shared, but those that were evictable are no longer available then.
        Copies in the host's memory take a block each.
        """
        blocks = -(-tokens // self.block_size)
        return blocks - len(match.blocks) + match.evictable if match else blocks

    def admit(self, sequence: Sequence, match: Match | None, tokens: int) -> None:
        """Give a waiting sequence a block table for `tokens` tokens that shares `match`.

        Copies in the host's memory that continue `match` are copied back, and shared from now on.
        Raises ValueError if less than its `price` is available.
        """
        blocks = match.blocks if match else []
        wanted = self.blocks_for(tokens) - len(blocks)
        if match is not None:
            sequence.node = self._cache.pin(sequence.namespace, match)
        if match is not None and match.hosted:
            blocks = blocks + self._take_back(sequence, match)
            wanted -= match.hosted
        sequence.blocks = blocks + self._take(wanted)
        sequence.shared = len(blocks)
        sequence.computed = sequence.cached_at_start = len(blocks) * self.block_size
        if self.states is not None:
            saving, digests = match is not None, match.digests if match is not None else ()
            sequence.states, start = self.states.admit(blocks, sequence.length, saving, digests)
            sequence.computed = start * self.block_size
        self._claim(sequence)

    def _take_back(self, sequence: Sequence, match: Match) -> list[int]:
        """Return new blocks of the prefix cache, to which copies that continue `match` go."""
        node, key, tier = sequence.node, sequence.key, self.tier
        if node is None or key is None or tier is None:
            raise ValueError("there are no copies behind what is not cached")
        first, end = len(match.blocks), len(match.digests)
        digests = match.digests[first:]
        places = tier.reserve(digests)  # before blocks are evicted, which may want their places
        blocks = self._take(match.hosted)
        tier.copy_back(digests, places, blocks)
        size = self._block_bytes
        sequence.node, _ = self._cache.insert(node, key[first * size : end * size], blocks)
        return blocks

    def extend(self, sequence: Sequence, tokens: int) -> list[int]:
        """Grant blocks for `tokens` tokens in all, or as many as are available; returns them."""
        granted = self._take(min(self.count_lacking(sequence, tokens), self.available))
        sequence.blocks += granted
        return granted

    def count_lacking(self, sequence: Sequence, tokens: int) -> int:
        """Return how many blocks a sequence lacks for `tokens` tokens in all."""
        return max(0, -(-tokens // self.block_size) - len(sequence.blocks))

    def make_free(self, count: int, match: Match | None = None) -> None:
        """Evict until `count` blocks are free or nothing evictable is left; `match` stays.

        To be called before granting blocks to several sequences: one eviction is cheaper than many.
        """
        short = count - self._allocator.free
        if short > 0:
            evicted = self._cache.evict(short, () if match is None else match.path)
            self._give_evicted(evicted, sound=True)

    def _give_evicted(self, blocks: list[int], *, sound: bool = False) -> None:
        """Free blocks that the cache has evicted; `sound`: their snapshots may be copied."""
        if self.states is not None:
            self.states.forget_blocks(blocks, sound=sound)
        self._allocator.give(blocks)

    def _take(self, count: int) -> list[int]:
        self.make_free(count)
        return self._allocator.take(count)

    def count_reclaimable(self, sequence: Sequence) -> int:
        """Return how many blocks become available when `sequence` is released."""
        blocks = len(sequence.blocks) - sequence.shared
        node = sequence.node
        while node is not None and node.pins == 1:
            blocks += len(node.blocks)
            node = node.parent
        return blocks

    # -- sharing -------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Put the computed full blocks of a prompt, and its snapshots, into the prefix cache."""
        self._publish_blocks(sequence)
        if self.states is not None and sequence.states is not None:
            shared, named = sequence.blocks[: sequence.shared], self.states.tier and sequence.key
            digests = sequence.digest_blocks(self._block_bytes) if named else ()
            self.states.publish(sequence.states, sequence.computed, shared, digests)

    def _publish_blocks(self, sequence: Sequence) -> None:
        node, key = sequence.node, sequence.key
        if node is None or key is None:
            return
        full = min(sequence.computed, sequence.target) // self.block_size
        if full <= sequence.shared:
            return
        self._unclaim(sequence)
        tokens = key[sequence.shared * self._block_bytes : full * self._block_bytes]
        if self._cache.continues(node, tokens):
            # Another sequence has published the same tokens first. The shard reads our copy, so the
            # block table stays as it is; `release` frees the duplicates.
            return
        own = sequence.blocks[sequence.shared : full]
        sequence.node, _ = self._cache.insert(node, tokens, own)
        sequence.shared = full
        self._claim(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Note that the prompt is computed and published; what follows is published at the end."""
        sequence.key = None
        sequence.digests = []
        if self.states is not None and sequence.states is not None:
            self.states.settle(sequence.states)

    def release(self, sequence: Sequence, sound: bool = True) -> None:
        """Take back all blocks of `sequence`, which no step uses any more.

        Computed full blocks go to the prefix cache, those of generated tokens too, unless the
        sequence failed (`sound` is False): then their contents cannot be trusted.
        """
        self._unclaim(sequence)
        if self.states is not None and sequence.states is not None:
            self.states.release(sequence.states, sound)
        own = sequence.blocks[sequence.shared :]
        node = sequence.node
        if node is not None:
            grown = sequence.shared - sequence.cached_at_start // self.block_size
            full = min(sequence.computed, sequence.length) // self.block_size - sequence.shared
            if sound and full > 0:
                tokens = sequence.token_bytes(sequence.shared * self.block_size)
                node, spare = self._cache.insert(node, tokens, own[:full])
                own = spare + own[full:]
            self._cache.unpin(node)
            if not sound:
                self._give_evicted(self._cache.discard(node, grown))
        self._allocator.give(own)
        sequence.forget_blocks()
        if self._unloaded and (adapter := sequence.namespace[0]) in self._unloaded:
            self.evict_adapter(adapter)

    def evict_adapter(self, adapter: int) -> None:
        """Free the prefixes of an adapter that will not be used again.

        Those that sequences still use are freed as these end.
        """
        blocks, left = self._cache.evict_adapter(adapter)
        self._give_evicted(blocks)
        if left:
            self._unloaded.add(adapter)
        else:
            self._unloaded.discard(adapter)

    def lags(self, match: Match | None, tokens: int, growing: int) -> bool:
        """Return whether a prompt of `tokens` waits until what makes room for it has been copied.

        `growing`: blocks that others will be granted soon, which are not for the prompt.
        """
        shared = len(match.blocks) if match is not None else 0
        wanted = self.blocks_for(tokens) - shared
        return self._ahead is not None and self._ahead.lags(match, wanted, growing, self.free)

    def take_transfers(self, wanted_soon: int) -> list[Transfer]:
        """Return the copies to be made before what is granted is used; `wanted_soon`: blocks."""
        if self._ahead is None:
            return []
        self._ahead.order(wanted_soon, self.free)
        return self._ahead.take_orders()

    def note_copied(self, count: int) -> None:
        """Note how many of the copies ordered of this shard are over."""
        if self._ahead is not None:
            self._ahead.note_over(count)

    def collect_prefixes(
        self, budget: Budget, has_changed: Callable[[], bool]
    ) -> Iterator[Collected | None]:
        """Yield None piece by piece, then the prefixes to keep, most recently used first.

        None of them where anything `has_changed` in between.
        """
        return kept_prefixes.collect(self._cache, self.states, self.tier, budget, has_changed)

    def restore_prefixes(self, found: KeptPrefixes, on_device: int) -> None:
        """Take prefixes that a new shard has: so many runs in its first blocks and slots, as far as
        these may be granted, and the others in the host's memory.

        Raises ValueError if any memory is in use.
        """
        if self.tier is not None:
            of_states = None if self.states is None else self.states.tier
            kept_prefixes.restore_copies(found, on_device, self.tier, of_states)
        kept = KeptPrefixes(found.block_size, found.runs[:on_device])
        kept = kept.fit(self.total, 0 if self.states is None else self.states.total)
        blocks = self._allocator.take(kept.blocks)
        with_states = kept_prefixes.graft(kept, blocks, self._cache)
        slots = [] if self.states is None else self.states.restore(with_states)
        if blocks != list(range(1, len(blocks) + 1)) or slots != list(range(1, kept.slots + 1)):
            raise ValueError("prefixes can only be restored into empty memory")

    def clear(self) -> None:
        """Free all blocks and prefixes; for a shard that has died."""
        self._allocator.clear()
        self._cache.clear()
        if self.states is not None:
            self.states.clear()
        if self._ahead is not None:
            self._ahead.clear()
        self._unloaded.clear()

    def _claim(self, sequence: Sequence) -> None:
        """Announce the block that `sequence` computes next, so that others wait and share it."""
        if sequence.node is None or sequence.key is None:
            return
        if sequence.shared >= sequence.length // self.block_size:
            return  # the rest of the prompt does not fill a block
        start = sequence.shared * self._block_bytes
        sequence.claim = sequence.key[start : start + self._block_bytes]
        self._cache.claim(sequence.node, sequence.claim)

    def _unclaim(self, sequence: Sequence) -> None:
        if sequence.claim is not None and sequence.node is not None:
            self._cache.unclaim(sequence.node, sequence.claim)
        sequence.claim = None

    # -- invariants ----------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block has one owner and every pin a sequence."""
        sequences = list(sequences)
        self._cache.check(s.node for s in sequences if s.node is not None)
        if self._ahead is not None:
            self._ahead.check()
        owned: list[int] = [block for node in self._cache.nodes() for block in node.blocks]
        if self.states is not None:
            holds = [s.states for s in sequences if s.states is not None]
            if len(holds) != sum(bool(s.blocks) for s in sequences):
                raise AssertionError("not everybody who has blocks has slots, or the other way")
            self.states.check(holds, owned)
        claims = 0
        for sequence in sequences:
            owned += sequence.blocks[sequence.shared :]
            path: list[int] = []
            node = sequence.node
            while node is not None:
                path[:0] = node.blocks
                node = node.parent
            if path != sequence.blocks[: sequence.shared]:
                raise AssertionError(f"{sequence} shares blocks that are not the cache's")
            known = sequence.computed
            if self.states is not None:  # K and V of others, whose states are computed again
                known = max(known, sequence.cached_at_start)
            if sequence.shared * self.block_size > known:
                raise AssertionError(f"{sequence} has published what is not computed")
            claims += sequence.claim is not None
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        self._allocator.check(set(owned))
        held = sum(len(s.blocks) - s.shared for s in sequences) + self._cache.pinned
        if self.free + self.cached + held != self.total or held != self.held:
            raise AssertionError("free, cached and held blocks are not the whole")
        if claims != sum(sum(node.claims.values()) for node in self._cache.nodes()):
            raise AssertionError("a claim is left without its sequence")
