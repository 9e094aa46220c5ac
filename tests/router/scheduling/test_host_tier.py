"""Copies of evicted prefixes in the host's memory; `test_machine.py` has any order of events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.scheduling.harness import World, limits, request
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.scheduling import Copy, admission, shard_commands
from tgi_trio.router.scheduling.block_digests import begin_digests, extend_digests
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.shard_commands import Command, Prefill, copies
from tgi_trio.router.scheduling.state_memory import StateMemory

BLOCK = 4
FIRST, SECOND = list(range(50, 82)), list(range(150, 182))  # eight blocks each


def world(**changes: Any) -> World:
    """Room for one of the two prompts on the device, and for both in the host's memory."""
    chosen = {
        **{"blocks": 13, "host_blocks": 20, "prefix_caching": True, "reserve": False},
        **{"ask_ahead": 2, "grant_ahead": 4},
        **changes,
    }
    return World(limits(**chosen))


def ask(here: World, prompt: list[int], new: int = 2, **changes: Any) -> int:
    """Serve a prompt alone; return how many of its tokens were not computed."""
    before = here.scheduler.counters["prefix_hit_tokens"]
    here.submit(request(prompt, new, **changes))
    here.run()
    return here.scheduler.counters["prefix_hit_tokens"] - before


# --- in the scheduler ----------------------------------------------------------------------------


def test_a_prompt_whose_prefix_was_evicted_is_not_computed_again() -> None:
    here = world()
    assert ask(here, [*FIRST, 5]) == 0
    assert ask(here, [*SECOND, 5]) == 0  # the first is evicted
    assert ask(here, [*FIRST, 6]) == len(FIRST)
    assert ask(here, [*SECOND, 6]) == len(SECOND)
    counters = here.scheduler.counters
    assert counters["copied_back"] >= 8 and counters["copied_out"] >= 8


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_long_prompt_is_looked_for_bit_by_bit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of a million tokens took the router's loop 60 ms in one turn."""
    monkeypatch.setattr(admission, "MOST_DIGESTED", most)
    monkeypatch.setattr(admission, "_FEW_DIGESTED", 1)
    here = world()
    scheduler, schedule, longest = here.scheduler, here.scheduler.schedule, [0]

    def count_digests() -> int:
        return sum(len(each.digests) for each in scheduler._sequence_table.living.values())

    def schedule_counted(now: float) -> list[Command]:
        before = count_digests()
        commands = list(schedule(now))
        longest[0] = max(longest[0], count_digests() - before)
        return commands

    monkeypatch.setattr(scheduler, "schedule", schedule_counted)
    assert ask(here, [*FIRST, 5]) == 0
    assert ask(here, [*SECOND, 5]) == 0
    assert ask(here, [*FIRST, 6]) == len(FIRST)
    assert longest[0] == most
    here.submit(request([*SECOND, 6], 2))
    here.submit(request([7, 8, 9, 7, 8], 2))  # of one whole block
    commands = scheduler.schedule(here.now)
    assert scheduler.makes_room == (most < 8)
    rows = [row for each in commands if isinstance(each, Prefill) for row in each.rows]
    assert any(row.prompt_length == 5 for row in rows), "the short one does not wait"


def test_without_such_memory_it_is() -> None:
    here = world(host_blocks=0)
    assert ask(here, [*FIRST, 5]) == ask(here, [*SECOND, 5]) == 0
    assert ask(here, [*FIRST, 6]) < len(FIRST)
    assert here.scheduler.counters["copied_out"] == 0


def test_what_has_been_copied_back_is_evicted_without_another_copy() -> None:
    here = world()
    ask(here, [*FIRST, 5], 1)
    ask(here, [*SECOND, 5], 1)
    ask(here, [*FIRST, 6], 1)
    before = here.scheduler.counters["copied_out"]
    ask(here, [*SECOND, 6], 1)  # evicts the first once more
    assert here.scheduler.counters["copied_out"] - before <= 1


def test_the_end_of_a_run_goes_first_where_there_are_few_places() -> None:
    here = world(host_blocks=3)
    ask(here, [*FIRST, 5])
    ask(here, [*SECOND, 5])
    found = ask(here, [*FIRST, 6])
    assert found and found % BLOCK == 0 and found <= len(FIRST)
    held, places = here.scheduler.host_blocks
    assert held <= places == 3


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "pepper"},
        {"sampling": SamplingParameters(ignore_eos=True, adapter=3)},
    ],
)
def test_only_requests_of_one_namespace_share_copies(other: dict[str, Any]) -> None:
    here = world()
    ask(here, [*FIRST, 5])
    ask(here, [*SECOND, 5])
    assert ask(here, [*FIRST, 6], **other) == 0
    assert ask(here, [*FIRST, 7]) == len(FIRST)


def test_who_needs_the_prompts_probabilities_computes_the_prompt() -> None:
    here = world()
    ask(here, [*FIRST, 5])
    ask(here, [*SECOND, 5])
    wanted = SamplingParameters(ignore_eos=True, prompt_logprobs=True)
    assert ask(here, [*FIRST, 5], sampling=wanted) == 0


def test_a_shard_that_died_has_no_copies() -> None:
    here = world()
    ask(here, [*FIRST, 5])
    ask(here, [*SECOND, 5])
    assert here.scheduler.host_blocks[0]
    here.crash()
    assert here.scheduler.host_blocks == (0, 20)
    assert isinstance(here.shard, ModelShard) and not here.shard.host
    assert ask(here, [*FIRST, 6]) == 0


def test_orders_come_before_what_is_granted() -> None:
    """The number of a command is its place in the ring."""
    here = world()
    ask(here, [*FIRST, 5])
    ask(here, [*SECOND, 5])
    here.submit(request([*FIRST, 6], 2))
    kinds = [type(command).__name__ for command in here.scheduler.schedule(here.now)]
    assert kinds == ["Copy", "Prefill"]


def test_many_copies_are_ordered_by_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_commands, "_MOST_TRANSFERS", 4)
    transfers = [Transfer(n, n, back=False) for n in range(1, 10)]
    numbers = iter(range(7, 20))
    cut = list(copies(transfers, lambda: next(numbers)))
    assert [command.number for command in cut] == [7, 8, 9]
    assert all(isinstance(command, Copy) and len(command.transfers) <= 4 for command in cut)
    assert [each for command in cut for each in command.transfers] == transfers


# --- with states ---------------------------------------------------------------------------------

STATES = {"state_slots": 3, "host_slots": 6, "blocks": 14}


def test_a_snapshot_comes_back_with_its_blocks() -> None:
    here = world(**STATES)
    ask(here, [*FIRST, 5], 1)
    ask(here, [*SECOND, 5], 1)
    assert ask(here, [*FIRST, 6], 1) == len(FIRST)
    assert here.scheduler.counters["states_copied_back"] == 1


def test_blocks_without_a_snapshot_behind_them_stay_where_they_are() -> None:
    """Their tokens would have to be computed all the same, for the states."""
    here = world(**STATES)
    ask(here, [*FIRST, 5], 1)
    ask(here, [*SECOND, 5], 1)
    before = here.scheduler.counters["copied_back"]
    assert ask(here, [*FIRST[:-BLOCK], 6], 1) == 0  # the snapshot is behind the block that follows
    assert here.scheduler.counters["copied_back"] == before


def test_a_snapshot_that_came_back_is_evicted_without_another_copy() -> None:
    here = world(**STATES)
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        ask(here, [*prompt, 5], 1)
    before = here.scheduler.counters["states_copied_out"]
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        ask(here, [*prompt, 6], 1)
    assert here.scheduler.counters["states_copied_out"] == before


def test_the_place_of_a_snapshot_that_comes_back_is_not_reused_before() -> None:
    memory = StateMemory(5, BLOCK, host_slots=1)
    tier = memory.tier
    assert tier is not None
    names = [[bytes([first, n]) for n in range(8)] for first in range(4)]
    for first, digests in enumerate(names):
        blocks = [10 * first + n for n in range(1, 9)]
        hold, _ = memory.admit([], 9 * BLOCK, saving=True)
        memory.publish(hold, 8 * BLOCK, blocks, digests)
        memory.release(hold, sound=True)
        if not first:
            memory.forget_blocks(blocks, sound=True)
    assert names[0][7] in tier and len(tier.take_orders()) == 1
    memory.admit([], 1, saving=False)
    assert memory.free == 0 and memory.available == 3
    hold, start = memory.admit([*range(1, 8), 50], 9 * BLOCK, saving=True, digests=names[0])
    assert start == 8 and hold.source is not None
    assert (hold.source.block, hold.source.digest) == (50, names[0][7])
    assert tier.take_orders()[0].back, "it is reused only once it has been read"


# --- alone ---------------------------------------------------------------------------------------


def digests_of(tokens: bytes, namespace: tuple[int, str] = (0, "")) -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, begin_digests(namespace), tokens, 2)
    return found


def test_digests_cover_all_that_comes_before() -> None:
    assert digests_of(b"aabbcc")[:2] == digests_of(b"aabbdd")[:2]
    assert digests_of(b"aabbcc")[2] != digests_of(b"aabbdd")[2]
    assert digests_of(b"xxbbcc")[1] != digests_of(b"aabbcc")[1]
    assert len(digests_of(b"aabbc")) == 2
    assert digests_of(b"aa", (1, "")) != digests_of(b"aa", (0, "")) != digests_of(b"aa", (0, "s"))
    assert digests_of(b"aa", (1, "2 ")) != digests_of(b"aa", (12, ""))
    whole, parts = digests_of(b"aabbcc"), digests_of(b"aa")
    extend_digests(parts, b"not looked at", b"aabbcc", 2)
    assert parts == whole


def test_reserved_copies_keep_their_places() -> None:
    tier = HostTier(2)
    tier.copy_out([b"a", b"b"], [5, 6])
    assert tier.held == 2 and tier.count_held([b"x", b"a", b"b", b"c"], 1) == 2
    places = tier.reserve([b"a", b"b"])
    tier.copy_out([b"c", b"d"], [7, 8])  # there is no place for them
    assert tier.held == 0
    tier.copy_back([b"a", b"b"], places, [7, 8])
    orders = tier.take_orders()
    assert [(each.item, each.back) for each in orders] == [
        (6, False),
        (5, False),
        (7, True),
        (8, True),
    ]
    assert {each.place for each in orders if each.back} == {1, 2}
    tier.copy_out([b"c"], [9])  # where the end of the run was that has come back
    assert b"a" in tier and b"b" not in tier
    tier.check()
    assert tier.take_orders()[0].item == 9 and tier.take_orders() == []


def test_a_run_longer_than_the_memory_keeps_its_beginning() -> None:
    tier = HostTier(3)
    tier.copy_out([bytes([n]) for n in range(8)], list(range(1, 9)))
    assert [bytes([n]) in tier for n in range(8)] == [True] * 3 + [False] * 5
    assert len(tier.take_orders()) == 3


def test_what_was_used_last_stays() -> None:
    tier = HostTier(2)
    tier.copy_out([b"a"], [1])
    tier.copy_out([b"b"], [2])
    tier.copy_out([b"a"], [3])  # evicted again, its copy is still there
    tier.copy_out([b"c"], [4])
    assert b"a" in tier and b"b" not in tier and b"c" in tier
    assert [each.item for each in tier.take_orders()] == [1, 2, 4]
