"""Blocks that are copied out before they are evicted, so that who grows never waits for a copy.

`test_machine.py` has any order of events.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.router.scheduling.harness import World, limits, request
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling import Copy, Prefill
from tgi_trio.router.scheduling.copies_ahead import CopiesAhead
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.prefix_cache import PrefixCache

BLOCK = 4
OLD = 40  # tokens of each prompt that fills the device


def world(**changes: Any) -> World:
    """Room for 160 blocks on the device, and for 400 in the host's memory."""
    chosen = {
        **{"blocks": 161, "host_blocks": 400, "prefix_caching": True, "reserve": False},
        **{"ask_ahead": 8, "grant_ahead": 16, "max_batch_prefill_tokens": 1000},
        **{"token_budget": 1000},
        **changes,
    }
    return World(limits(**chosen))


def old_prompt(number: int) -> list[int]:
    return [1000 * number + place for place in range(OLD)]


def fill(here: World, prompts: int = 16, first: int = 0) -> None:
    """Have the prefixes of so many prompts cached, ten blocks each."""
    for number in range(first, first + prompts):
        here.submit(request(old_prompt(number), 1))
        here.run()


def turn(here: World) -> tuple[list[Transfer], int]:
    """Let one round pass; return the copies that it ordered, and how many rows sat it out."""
    here.send()
    commands = [command for command in here.down if isinstance(command, Copy)]
    here.apply(len(here.down))
    report = here.shard.step()
    here.up.append(report)
    here.receive(1)
    return [each for command in commands for each in command.transfers], report.stalled_rows


def finish(here: World) -> tuple[list[Transfer], int]:
    """Let rounds pass until nobody is left; return the same of all of them."""
    copies, stalled = [], 0
    while here.open:
        more, sat_out = turn(here)
        copies += more
        stalled += sat_out
    return copies, stalled


def generate(here: World, count: int = 2) -> list[Transfer]:
    """Have some sequences generate that grow; return the copies that were ordered meanwhile."""
    for number in range(1, 1 + count):
        here.submit(request([9 * number] * 5, 90))
    return [each for _ in range(4) for each in turn(here)[0]]


def ask_long(here: World, tokens: int) -> int:
    return here.submit(request(list(range(50_000, 50_000 + tokens)), 3))


def contents(here: World) -> list[tuple[int, ...]]:
    """Return what the places of the host's memory hold, by the tokens up to there."""
    shard = here.shard
    assert isinstance(shard, ModelShard)
    return [tokens for (_, offset), tokens in shard.host.items() if offset == BLOCK - 1]


@pytest.mark.parametrize("prompt", [200, 400, 500])
def test_who_grows_sits_no_step_out_while_room_is_made_for_a_long_prompt(prompt: int) -> None:
    here = world()
    fill(here)
    copies = generate(here)
    ask_long(here, prompt)
    more, stalled = finish(here)
    assert stalled == 0
    assert sum(not each.back for each in copies + more) > prompt // BLOCK // 2


def test_what_a_long_prompt_leaves_is_enough_for_all_who_grow() -> None:
    here = world(blocks=241, ask_ahead=2, grant_ahead=8)
    fill(here, 20)
    generate(here, 5)
    ask_long(here, 300)
    assert finish(here)[1] == 0


def test_no_block_is_copied_twice() -> None:
    here = world()
    for _ in range(2):
        fill(here)
        generate(here)
        ask_long(here, 400)
        finish(here)
    found = contents(here)
    assert len(found) > 150 and len(set(found)) == len(found)


def test_nothing_is_copied_while_there_is_room() -> None:
    here = world()
    fill(here, 5)
    assert generate(here) == finish(here)[0] == []
    assert here.scheduler.counters["copied_out"] == 0


def test_what_is_used_again_at_once_is_not_copied() -> None:
    """It is not among those that go next."""
    here = world(max_batch_prefill_tokens=40)
    fill(here, 14)
    before = here.scheduler.counters["copied_out"]
    for end in range(60):
        here.submit(request([*old_prompt(13), 5, end], 1))
        here.run()
    assert here.scheduler.counters["copied_out"] - before <= 40
    own = tuple(old_prompt(13))
    assert not [tokens for tokens in contents(here) if tokens[: len(own)] == own[: len(tokens)]]


def test_what_has_been_copied_makes_room_at_once() -> None:
    here = world(max_batch_prefill_tokens=40)
    fill(here)
    generate(here)
    for _ in range(40):
        turn(here)
    assert here.scheduler.free_blocks < 10
    long = ask_long(here, 20)
    here.send()
    prefill = next(command for command in here.down if isinstance(command, Prefill))
    assert [row.sequence for row in prefill.rows] == [long]
    assert isinstance(here.shard, ModelShard)
    here.apply(len(here.down))
    assert here.shard.rows[long].after <= here.shard.copied, "it waits for no copy"


def test_a_prompt_alone_waits_for_nobody_in_the_queue() -> None:
    here = world()
    fill(here)
    ask_long(here, 400)
    here.send()
    assert any(isinstance(command, Prefill) for command in here.down)


def test_a_prompt_waits_for_copies_no_longer_than_they_take() -> None:
    here = world()
    fill(here)
    generate(here)
    long = ask_long(here, 400)
    assert isinstance(here.shard, ModelShard)
    most = here.shard.copied + 2 * 100  # it needs 100 blocks, and others grow
    while here.scheduler.is_queued(long):
        turn(here)
        assert here.shard.copied <= most
    assert here.open == {1 + 16, 2 + 16, long}, "the others have not ended before"


def test_what_a_prompt_shares_is_not_copied_for_it() -> None:
    here = world()
    shared = list(range(70_000, 70_000 + 80))
    fill(here, 6)  # the first to go
    here.submit(request([*shared, 1], 1))
    here.run()
    fill(here, 8, first=6)
    generate(here)
    here.submit(request([*shared, *range(50_000, 50_000 + 300)], 3))
    finish(here)
    assert not [tokens for tokens in contents(here) if tokens == tuple(shared[: len(tokens)])]


def test_less_memory_than_a_prompt_needs_ends_as_well() -> None:
    here = world(host_blocks=20)
    fill(here)
    generate(here)
    ask_long(here, 500)
    finish(here)
    here.run()


def test_a_shard_that_died_is_owed_no_copies() -> None:
    here = world()
    fill(here)
    generate(here)
    ask_long(here, 400)
    turn(here)
    here.crash()
    fill(here)
    generate(here)
    ask_long(here, 400)
    _, stalled = finish(here)
    assert stalled == 0


def test_snapshots_of_states_are_copied_with_their_blocks() -> None:
    here = world(state_slots=60, host_slots=60)
    fill(here)
    generate(here)
    ask_long(here, 400)
    _, stalled = finish(here)
    assert stalled == 0
    assert isinstance(here.shard, ModelShard)
    found = list(here.shard.host_slots.values())
    assert len(found) >= 8 and len(set(found)) == len(found)


def test_copies_that_are_there_make_no_room_for_those_beside_them() -> None:
    cache, tier = PrefixCache(1), HostTier(6)
    for blocks in ([5, 6], [1, 2, 3, 4]):
        root = cache.pin((0, ""), cache.match((0, ""), b"", 0))
        leaf, _ = cache.insert(root, np.array(blocks, np.int32).tobytes(), blocks)
        cache.unpin(leaf)
    tier.copy_out(cache.digests_of(leaf), leaf.blocks)  # those that go later
    tier.copy_out([b"x", b"y"], [7, 8])
    ahead = CopiesAhead(tier, cache, None, most=6)
    ahead.note_over(len(ahead.take_orders()))
    ahead.order(6, free=0)
    assert sorted(each.item for each in ahead.take_orders()) == [5, 6]
    assert b"x" not in tier and b"y" not in tier
    assert all(digest in tier for digest in leaf.digests)
    ahead.check()
