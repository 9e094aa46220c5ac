"""Slots of states: who starts from which snapshot, when one is taken, and who has to give way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.scheduling.harness import Pair, limits, request
from tgi_trio.ipc.messages import Fault, PrefillRow
from tgi_trio.router.scheduling import Prefill
from tgi_trio.router.scheduling.state_memory import StateMemory

SHARED = list(range(50, 82))  # eight blocks


def pair(**changes: Any) -> Pair:
    return Pair(limits(**{"reserve": False, "prefix_caching": True, "state_slots": 12} | changes))


def prefills(commands: list[Any]) -> list[PrefillRow]:
    return [row for command in commands if isinstance(command, Prefill) for row in command.rows]


def submit(here: Pair, id: int, prompt: list[int], max_new: int = 4) -> None:
    here.scheduler.add(id, request(prompt, max_new), here.now)


def test_a_repeated_prompt_starts_behind_its_last_full_block() -> None:
    here = pair()
    submit(here, 1, [*SHARED, 5, 6])
    here.run()
    submit(here, 2, [*SHARED, 5, 6])
    (row,) = prefills(here.send())
    assert row.cached_length == 32
    assert row.states is not None and row.states.source and not row.states.saves
    here.run()
    assert here.tokens[1] == here.tokens[2]
    total, free, snapshots = here.scheduler.state_slots
    assert (free, snapshots) == (total - 1, 1)


def test_a_snapshot_is_taken_where_a_prompt_leaves_what_is_cached() -> None:
    here = pair()
    submit(here, 1, SHARED + list(range(100, 130)))
    here.run()
    # K and V of what they share are there, the states behind it are not.
    submit(here, 2, SHARED + list(range(200, 220)))
    (row,) = prefills(here.send())
    assert row.cached_length == 0
    assert row.states is not None and row.states.held_length == 32
    assert [at for at, _ in row.states.saves] == [32, 48]
    here.run()
    submit(here, 3, SHARED + list(range(300, 330)))
    (row,) = prefills(here.send())
    assert row.cached_length == 32
    here.run()
    assert sorted(here.finished) == [1, 2, 3]


def test_who_shares_a_prompt_waits_for_its_snapshot() -> None:
    here = pair(token_budget=8)
    for id in range(1, 5):
        submit(here, id, [*SHARED, 5, 6])
    assert len(prefills(here.send())) == 1
    here.run()
    assert here.scheduler.counters["prefix_hit_tokens"] == 3 * 32


def test_short_prompts_are_not_worth_a_snapshot() -> None:
    here = pair()
    submit(here, 1, list(range(2, 16)))  # three full blocks and a part
    (row,) = prefills(here.send())
    assert row.states is not None and not row.states.saves
    here.run()
    assert here.scheduler.state_slots.snapshots == 0


def test_two_slots_serve_one_after_the_other() -> None:
    here = pair(state_slots=2)
    for id in range(1, 4):
        submit(here, id, [*SHARED, id, 6])
    assert len(prefills(here.send())) == 1
    here.run()
    assert sorted(here.finished) == [1, 2, 3]


def test_snapshots_give_way_to_sequences_least_recently_used_first() -> None:
    here = pair(state_slots=6, blocks=129)
    prompts = [[id, *SHARED, 5] for id in range(1, 7)]
    for id, prompt in enumerate(prompts, start=1):
        submit(here, id, prompt)
        here.run()
    assert here.scheduler.state_slots == (6, 2, 4)  # of the last four
    cached = []
    for id, which in enumerate((2, 5, 0, 2, 3), start=7):  # the first of all takes the oldest's
        submit(here, id, prompts[which])
        (row,) = prefills(here.send())
        cached.append(row.cached_length)
        here.run()
    assert cached == [32, 32, 0, 32, 0]


def test_what_a_failed_sequence_saved_is_not_used() -> None:
    here = pair()
    submit(here, 1, [*SHARED, 5, 6])
    here.step()
    here.step()
    here.shard.rows.clear()
    here.scheduler.fault([Fault(1, "NaN")], here.shard.applied, here.now)
    here.scheduler.check()
    submit(here, 2, [*SHARED, 5, 6])
    (row,) = prefills(here.send())
    assert row.cached_length == 0


def test_snapshots_go_with_the_blocks_that_they_stand_behind() -> None:
    here = pair(blocks=12)
    submit(here, 1, [*SHARED, 5, 6])
    here.run()
    submit(here, 2, list(range(200, 240)))  # ten blocks: those of the first are evicted
    here.run()
    submit(here, 3, [*SHARED, 5, 6])
    (row,) = prefills(here.send())
    assert row.cached_length == 0
    here.run()


def test_without_a_prefix_cache_nothing_is_saved() -> None:
    here = pair(prefix_caching=False)
    submit(here, 1, [*SHARED, 5, 6])
    (row,) = prefills(here.send())
    assert row.states is not None and row.states.saves == ()
    here.run()
    assert here.scheduler.state_slots == (12, 12, 0)


def test_one_slot_is_too_few() -> None:
    with pytest.raises(ValueError, match="a sequence needs 2 slots for states; there are 1"):
        StateMemory(1, 16)
