"""Prefixes that outlive their shard: whole trees, right blocks, and nothing else."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.router.scheduling.harness import World, request
from tests.router.scheduling.model_shard import ModelShard
from tests.router.scheduling.test_machine import WORLDS, any_request, world
from tgi_trio.errors import Overloaded
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.scheduling.block_digests import Origin, begin_digests
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.kept_prefixes import (
    FORGOTTEN,
    MOST_BLOCKS,
    PIECE,
    Budget,
    Collected,
    KeptPrefixes,
    KeptRun,
    collect,
)
from tgi_trio.router.scheduling.prefix_cache import PrefixCache

EVERYTHING = 1 << 40
CACHED = sorted(name for name in WORLDS if "prefix_caching" in WORLDS[name])
PROMPT = list(range(50, 82))  # eight blocks of four


def collected(here: World, budget: Budget) -> Collected:
    return last(here.scheduler.collect_prefixes(budget))


def last(pieces: Iterator[Collected | None]) -> Collected:
    *_, found = pieces
    assert found is not None
    return found


def some_requests(here: World, rng: random.Random, count: int) -> None:
    for _ in range(count):
        try:
            here.submit(any_request(rng))
        except Overloaded:
            here.run()
    here.run()


def begin_again(here: World, found: Collected) -> None:
    """Lose the shard; the next one has what was kept where an order to read says it is."""
    old = here.shard
    old.copy(len(old.copies))  # as a shard does that is told to keep prefixes
    here.crash()
    assert isinstance(here.shard, ModelShard) and here.shard is not old
    found.prefixes.check()
    limits = here.limits
    kept, on_device = found.prefixes.divide(
        *(limits.usable_blocks, limits.state_slots, limits.host_blocks, limits.host_slots)
    )
    own = KeptPrefixes(kept.block_size, kept.runs[:on_device])
    for number, block in enumerate(found.blocks[: kept.blocks], 1):
        contents = old.kv if block > 0 else old.host
        place = number if number <= own.blocks else number - own.blocks
        target = here.shard.kv if number <= own.blocks else here.shard.host
        for offset in range(limits.block_size):
            target[place, offset] = contents[abs(block), offset]
    for number, slot in enumerate(found.slots[: kept.slots], 1):
        states = old.slots if slot > 0 else old.host_slots
        place = number if number <= own.slots else number - own.slots
        (here.shard.slots if number <= own.slots else here.shard.host_slots)[place] = states[
            abs(slot)
        ]
    here.scheduler.restore_prefixes(kept, on_device)
    here.scheduler.check()


@pytest.mark.parametrize("name", CACHED)
def test_what_is_kept_is_what_the_next_shard_computes_with(name: str) -> None:
    """The shard of the harness fails whoever finds another's K and V, or states, in a block."""
    for seed in range(12):
        rng = random.Random(seed)
        here = world(name)
        some_requests(here, rng, 12)
        block, slot = rng.randint(1, 9), rng.randint(1, 9)
        left = rng.choice([EVERYTHING, rng.randint(0, 12 * block)])
        found = collected(here, Budget(left, block, slot))
        assert len(found.blocks) * block + len(found.slots) * slot <= left
        assert len(set(found.blocks)) == len(found.blocks) == found.prefixes.blocks
        begin_again(here, found)
        held, _ = here.scheduler.host_blocks
        assert here.scheduler.cached_blocks + held == len(found.blocks)
        some_requests(here, rng, 12)
        again = collected(here, Budget(EVERYTHING, 1, 1))
        begin_again(here, again)  # and once more, of prefixes that were kept before


def test_a_prompt_is_not_computed_again() -> None:
    here = world("grow, cached", block_size=4, blocks=65)
    here.submit(request([*PROMPT, 5], 4))
    here.run()
    begin_again(here, collected(here, Budget(EVERYTHING, 1, 1)))
    before = here.scheduler.counters["prefix_hit_tokens"]
    here.submit(request([*PROMPT, 6], 4))
    here.run()
    assert here.scheduler.counters["prefix_hit_tokens"] - before == len(PROMPT)


def test_what_was_used_last_is_kept_first() -> None:
    here = world("grow, cached", block_size=4, blocks=65)
    for first in (10, 30, 50):
        here.submit(request([first, *PROMPT], 1))
        here.run()
    here.submit(request([30, *PROMPT], 1))
    here.run()
    found = collected(here, Budget(8, 1, 1))
    assert found.prefixes.blocks == 8
    assert [np.frombuffer(run.tokens, np.int32)[0] for run in found.prefixes.runs] == [30]


def test_prefixes_of_adapters_and_behind_images_are_not_kept() -> None:
    here = world("grow, cached", block_size=4, blocks=65)
    here.submit(request(PROMPT, 1, sampling=SamplingParameters(ignore_eos=True, adapter=3)))
    here.run()
    assert here.scheduler.cached_blocks and not found_blocks(here)
    cache = PrefixCache(2)
    tokens = np.array([5, 6, 7, -4, 8, 9], np.int32).tobytes()
    top = cache.graft((0, ""), None, tokens, [1, 2, 3])
    cache.graft((0, ""), top, np.array([5, 6], np.int32).tobytes(), [4])
    found = last(collect(cache, None, None, Budget(EVERYTHING, 1, 1)))
    assert found.blocks == [1] and len(found.prefixes.runs) == 1


def found_blocks(here: World) -> list[int]:
    return collected(here, Budget(EVERYTHING, 1, 1)).blocks


def test_a_budget_is_spent_once() -> None:
    budget = Budget(109, 10, 30)
    assert budget.take_blocks(4) == 4 and budget.take_slot()
    assert budget.take_blocks(9) == 3 and not budget.take_slot()
    slots = Budget(95, 10, 30)
    assert [slots.take_slot() for _ in range(4)] == [True, True, True, False]
    assert slots.take_blocks(1) == 0
    ring = Budget(EVERYTHING, 1, 0)  # an order that names more would not fit
    assert ring.take_blocks(MOST_BLOCKS - 1) == MOST_BLOCKS - 1
    assert ring.take_blocks(5) == 1 and ring.take_blocks(5) == 0
    assert sum(ring.take_slot() for _ in range(MOST_BLOCKS + 5)) == MOST_BLOCKS


def test_less_memory_takes_the_first_runs() -> None:
    here = world("grow, cached", block_size=4, blocks=65)
    for first in (10, 30, 50):
        here.submit(request([first, *PROMPT], 1))
        here.run()
    kept = collected(here, Budget(EVERYTHING, 1, 1)).prefixes
    smaller = world("grow, cached", block_size=4, blocks=20)
    smaller.scheduler.restore_prefixes(kept, len(kept.runs))
    smaller.scheduler.check()
    assert smaller.scheduler.cached_blocks == 16
    with pytest.raises(ValueError, match="there already"):
        here.scheduler.restore_prefixes(kept, len(kept.runs))


@pytest.mark.parametrize(
    "run",
    [
        KeptRun("", 0, bytes(16)),  # before itself
        KeptRun("", -2, bytes(16)),
        KeptRun("", -1, bytes(15)),
        KeptRun("", -1, b""),
        KeptRun("", -1, bytes(16), (1,)),
        KeptRun("", -1, bytes(16), (0, 0)),
    ],
)
def test_what_is_no_tree_is_refused(run: KeptRun) -> None:
    with pytest.raises(ValueError, match="does not belong to a tree"):
        KeptPrefixes(4, (run,)).check()


# --- with copies in the host's memory ------------------------------------------------------------

OTHER = list(range(150, 182))


def two_prompts(**changes: int) -> World:
    """Return a world with one prompt's prefix on the device, and another's in the host's memory."""
    here = world("grow, host", **{"block_size": 4, "blocks": 13, "host_blocks": 20} | changes)
    for prompt in (PROMPT, OTHER):
        here.submit(request([*prompt, 5], 2))
        here.run()
    return here


def hits(here: World, prompt: list[int]) -> int:
    before = here.scheduler.counters["prefix_hit_tokens"]
    here.submit(request([*prompt, 6], 2))
    here.run()
    return here.scheduler.counters["prefix_hit_tokens"] - before


def test_what_is_in_the_hosts_memory_alone_is_kept_and_comes_back() -> None:
    here = two_prompts()
    found = collected(here, Budget(EVERYTHING, 1, 1))
    assert min(found.blocks) < 0 < max(found.blocks)
    assert sum(block > 0 for block in found.blocks) == here.scheduler.cached_blocks
    assert found.blocks == sorted(found.blocks, key=lambda block: block < 0), "the device's first"
    begin_again(here, found)
    assert here.scheduler.host_blocks[0] >= 4
    assert hits(here, OTHER) == len(OTHER)
    assert hits(here, PROMPT) == len(PROMPT)


def test_nothing_is_kept_twice() -> None:
    """Blocks that are copied ahead, or were copied back, are in both memories."""
    here = two_prompts()
    hits(here, PROMPT)
    found = collected(here, Budget(EVERYTHING, 1, 1))
    tokens = [run.token_ids for run in found.prefixes.runs]
    assert sum(map(len, tokens)) == found.prefixes.blocks * 4 == len(found.blocks) * 4
    assert len(found.blocks) < sum((here.scheduler.cached_blocks, here.scheduler.host_blocks[0])), (
        "some are in both"
    )
    assert sum(PROMPT[0] in own for own in tokens) == 1


def test_a_larger_device_takes_what_was_in_the_hosts_memory() -> None:
    found = collected(two_prompts(), Budget(EVERYTHING, 1, 1))
    kept, on_device = found.prefixes.divide(100, 0, 0, 0)
    assert on_device == len(kept.runs) == len(found.prefixes.runs)
    larger = world("grow, cached", block_size=4, blocks=65)
    larger.scheduler.restore_prefixes(kept, on_device)
    assert larger.scheduler.cached_blocks == kept.blocks


def test_what_does_not_fit_is_cut_at_its_end() -> None:
    runs = tuple(KeptRun("", -1, bytes([n] * 64), (1, 3)) for n in range(3))  # four blocks each
    kept = KeptPrefixes(4, runs)
    for blocks, slots, host_blocks, host_slots, lengths, snapshots, first in (
        (4, 2, 8, 9, [4, 4, 4], [2, 2, 2], 1),
        (5, 9, 3, 9, [4, 3], [2, 1], 1),
        (4, 9, 8, 3, [4, 4, 4], [2, 2, 1], 1),
        (4, 1, 9, 1, [4, 4, 1], [1, 0, 0], 0),
        (9, 9, 0, 0, [4, 4], [2, 2], 2),
    ):
        found, on_device = kept.divide(blocks, slots, host_blocks, host_slots)
        found.check()
        assert [found.count_blocks(run) for run in found.runs] == lengths
        assert [len(run.snapshots) for run in found.runs] == snapshots
        assert on_device == first


def test_copies_of_adapters_and_behind_images_are_not_kept() -> None:
    tier = HostTier(9)
    own, image, adapter = ((0, ""), np.array([5, -4], np.int32), (3, ""))
    for name, namespace, tokens in (
        (b"a", own, b"12341234"), (b"b", adapter, b"12341234"), (b"c", own, image.tobytes())
    ):  # fmt: skip
        tier.copy_out([name], [7], [Origin(namespace, begin_digests(namespace), tokens)])
    tier.copy_out([b"d"], [8], [Origin(own, b"c", b"12341234")])  # behind the image
    tier.copy_out([b"e"], [8], [Origin(own, b"x", b"12341234")])  # behind what is gone
    found = last(collect(PrefixCache(2), None, tier, Budget(EVERYTHING, 1, 1)))
    assert found.blocks == [-1]


def test_runs_end_where_several_others_follow() -> None:
    tier, own = HostTier(9), (0, "")
    names = {b"a": begin_digests(own), b"b": b"a", b"c": b"b", b"d": b"b", b"e": b"d"}
    for at, name in enumerate(reversed(names)):  # the beginning is the most recently used
        tier.copy_out([name], [1 + at], [Origin(own, names[name], name * 8)])
    found = last(collect(PrefixCache(2), None, tier, Budget(EVERYTHING, 1, 1)))
    runs = [(run.parent, run.tokens[::8]) for run in found.prefixes.runs]
    assert runs == [(-1, b"ab"), (0, b"c"), (0, b"de")]
    assert found.blocks == [-5, -4, -3, -2, -1]


# --- piece by piece ------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 40, 10 * PIECE])
def test_no_piece_of_the_listing_is_longer_than_others(runs: int) -> None:
    """One long prompt, some prompts, and a great many short ones."""
    cache, tier = PrefixCache(2), HostTier(10 * PIECE)
    each = 10 * PIECE // runs
    for run in range(runs):
        tokens = np.arange(each * 2, dtype=np.int32) + run * each * 2
        numbers = list(range(1 + run * each, 1 + (run + 1) * each))
        cache.graft((0, ""), None, tokens.tobytes(), numbers)
    origin = Origin((0, ""), begin_digests((0, "")), b"12341234")
    for place in range(10 * PIECE):
        tier.copy_out([b"%d" % place], [1], [origin])
    pieces = list(collect(cache, None, tier, Budget(EVERYTHING, 1, 1)))
    blocks = 20 * PIECE
    joined = runs + 10 * PIECE  # the tier's blocks follow no other
    expected = sum(count // PIECE for count in (blocks, blocks, joined))
    forgotten = 4 * -(-blocks // FORGOTTEN)  # of four collections, each of a part for every block
    assert expected - 3 <= pieces.count(None) <= expected + forgotten
    found = pieces[-1]
    assert found is not None and len(found.blocks) == blocks == found.prefixes.blocks
    found.prefixes.check()


def test_a_long_prompt_has_no_more_digests_than_have_been_asked_for() -> None:
    cache = PrefixCache(2)
    tokens = np.arange(20 * PIECE, dtype=np.int32)
    leaf = cache.graft((0, ""), None, tokens.tobytes(), list(range(1, 10 * PIECE + 1)))
    for place, _ in zip(
        range(3), collect(cache, None, None, Budget(EVERYTHING, 1, 1)), strict=False
    ):
        assert len(leaf.digests) == (place + 1) * PIECE


def test_nothing_is_found_once_something_has_changed() -> None:
    here = world("grow, host", block_size=4, blocks=13, host_blocks=20 + PIECE)
    for first in range(2 * PIECE // 8):
        here.submit(request([first, *PROMPT], 2))
        here.run()
    listing = here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1))
    assert next(listing) is None
    assert here.scheduler.schedule(here.now) == []  # looking for something to send changes nothing
    assert next(listing) is None
    hits(here, [0, *PROMPT])
    assert not any(listing)
    assert collected(here, Budget(EVERYTHING, 1, 1)).blocks
    listing = here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1))
    assert next(listing) is None
    here.scheduler.evict_adapter(3, here.now)
    assert not any(listing)
    listing = here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1))
    pieces = sum(each is None for each in here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1)))
    for _ in range(pieces):
        assert next(listing) is None
    here.scheduler.evict_adapter(3, here.now)
    assert list(listing) == [], "what was found is forgotten, and changed in the last moment"


@pytest.mark.parametrize("changes", [False, True])
def test_what_was_listed_is_freed_piece_by_piece(changes: bool) -> None:
    cache, blocks = PrefixCache(2), 8 * FORGOTTEN
    tokens = np.arange(blocks * 2, dtype=np.int32).tobytes()
    cache.graft((0, ""), None, tokens, list(range(1, blocks + 1)))
    changed: list[bool] = []
    listing = collect(cache, None, None, Budget(EVERYTHING, 1, 1), lambda: bool(changed))
    for _ in range(blocks // PIECE + 1):
        assert next(listing) is None
    before = sys.getallocatedblocks()
    freed: list[int] = []
    changed += [True] * changes
    for found in listing:
        after = sys.getallocatedblocks()
        freed.append(before - after)
        before = after
        if found is not None:
            break
    del listing
    freed.append(before - sys.getallocatedblocks())
    assert sum(each for each in freed if each > 0) > 2 * blocks
    assert max(freed) < 6 * FORGOTTEN
