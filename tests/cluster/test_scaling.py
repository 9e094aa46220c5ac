"""Replicas come and go between bounds, after patience, and never because of a moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.scaling import ReplicaLoad, Scaling

BUSY = ReplicaLoad(waiting=3, running=8, kv_used=0.5)
FULL = ReplicaLoad(waiting=0, running=8, kv_used=0.9)
CALM = ReplicaLoad(waiting=0, running=4, kv_used=0.6)
IDLE = ReplicaLoad(waiting=0, running=1, kv_used=0.1)


def last(scaling: Scaling, load: ReplicaLoad, start: int, seconds: int) -> int:
    """Let every wanted replica serve under `load`; returns what is wanted in the end."""
    for now in range(start, start + seconds + 1):
        scaling.observe(float(now), [load] * scaling.wanted)
    return scaling.wanted


@pytest.mark.parametrize("load", [BUSY, FULL])
def test_more_come_after_patience_one_at_a_time(load: ReplicaLoad) -> None:
    scaling = Scaling(1, 3, up_after=30, down_after=600)
    assert last(scaling, load, 0, 29) == 1
    assert last(scaling, load, 30, 0) == 2
    assert last(scaling, load, 31, 30) == 3
    assert last(scaling, load, 62, 500) == 3  # the bound


def test_a_moment_of_calm_begins_the_patience_anew() -> None:
    scaling = Scaling(1, 3, up_after=30, down_after=600)
    last(scaling, BUSY, 0, 29)
    last(scaling, CALM, 30, 0)
    assert last(scaling, BUSY, 31, 29) == 1
    assert last(scaling, BUSY, 61, 0) == 2


def test_fewer_stay_when_the_others_have_room_for_all() -> None:
    scaling = Scaling(1, 3, up_after=1, down_after=100)
    assert last(scaling, BUSY, 0, 4) == 3
    assert last(scaling, CALM, 10, 1000) == 3
    assert last(scaling, IDLE, 2000, 99) == 3
    assert last(scaling, IDLE, 2100, 0) == 2
    assert last(scaling, IDLE, 2101, 1000) == 1  # never fewer than one


def test_nothing_is_concluded_while_a_replica_starts() -> None:
    scaling = Scaling(2, 4, up_after=10, down_after=10)
    for now in range(100):
        assert scaling.observe(float(now), [BUSY]) == 2


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2), (-1, -1)])
def test_bounds_are_bounds(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"LOW:HIGH .* not {low}:{high}"):
        Scaling(low, high)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.sampled_from([BUSY, FULL, CALM, IDLE])), max_size=60)
)
def test_whatever_comes_it_stays_within_its_bounds(steps: list[tuple[float, ReplicaLoad]]) -> None:
    scaling = Scaling(2, 5)
    now, changed, before = 0.0, float("-inf"), scaling.wanted
    for seconds, load in steps:
        now += seconds
        wanted = scaling.observe(now, [load] * scaling.wanted)
        assert 2 <= wanted <= 5 and abs(wanted - before) <= 1
        if wanted != before:
            assert now - changed >= scaling.up_after
            changed, before = now, wanted
