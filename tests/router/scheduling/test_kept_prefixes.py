"""Prefixes that outlive their shard: whole trees, right blocks, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.router.scheduling.harness import World, request
from tests.router.scheduling.model_shard import ModelShard
from tests.router.scheduling.test_machine import WORLDS, any_request, world
from tgi_trio.errors import Overloaded
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.scheduling.kept_prefixes import (
    MOST_BLOCKS,
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
    here.crash()
    assert isinstance(here.shard, ModelShard) and here.shard is not old
    for number, block in enumerate(found.blocks, 1):
        for (at, offset), tokens in old.kv.items():
            if at == block:
                here.shard.kv[number, offset] = tokens
    for number, slot in enumerate(found.slots, 1):
        here.shard.slots[number] = old.slots[slot]
    found.prefixes.check()
    here.scheduler.restore_prefixes(found.prefixes)
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
        found = here.scheduler.collect_prefixes(Budget(left, block, slot))
        assert len(found.blocks) * block + len(found.slots) * slot <= left
        assert len(set(found.blocks)) == len(found.blocks) == found.prefixes.blocks
        begin_again(here, found)
        assert here.scheduler.cached_blocks == len(found.blocks)
        some_requests(here, rng, 12)
        again = here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1))
        begin_again(here, again)  # and once more, of prefixes that were kept before


def test_a_prompt_is_not_computed_again() -> None:
    here = world("grow, cached", block_size=4, blocks=65)
    here.submit(request([*PROMPT, 5], 4))
    here.run()
    begin_again(here, here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1)))
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
    found = here.scheduler.collect_prefixes(Budget(8, 1, 1))
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
    found = collect(cache, None, Budget(EVERYTHING, 1, 1))
    assert found.blocks == [1] and len(found.prefixes.runs) == 1


def found_blocks(here: World) -> list[int]:
    return here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1)).blocks


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
    kept = here.scheduler.collect_prefixes(Budget(EVERYTHING, 1, 1)).prefixes
    smaller = world("grow, cached", block_size=4, blocks=20)
    smaller.scheduler.restore_prefixes(kept)
    smaller.scheduler.check()
    assert smaller.scheduler.cached_blocks == 16
    with pytest.raises(ValueError, match="there already"):
        here.scheduler.restore_prefixes(kept)


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
