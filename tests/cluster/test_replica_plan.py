"""Servers are kept in virtual time: replaced when they end, told to leave before they stop."""

from __future__ import annotations

from tgi_trio.cluster.replica_host import read_load
from tgi_trio.cluster.replica_plan import (
    LONGEST_PAUSE_S,
    NOTICE_S,
    Phase,
    ReplicaPlan,
    StartReplica,
    StopReplica,
)
from tgi_trio.cluster.scaling import ReplicaLoad, Scaling

BUSY = ReplicaLoad(waiting=9, running=8, kv_used=0.9)
IDLE = ReplicaLoad(waiting=0, running=0, kv_used=0.0)


def plan(low: int = 2, high: int = 2) -> ReplicaPlan:
    return ReplicaPlan(Scaling(low, high, up_after=10, down_after=10))


def started(low: int = 2, high: int = 2) -> ReplicaPlan:
    kept = plan(low, high)
    for action in kept.decide(0.0):
        kept.serves(action.name, f"{action.name}:1")
    return kept


def test_as_many_as_wanted_are_placed_once() -> None:
    kept = plan()
    assert kept.decide(0.0) == [StartReplica("replica-1"), StartReplica("replica-2")]
    assert kept.decide(0.1) == [] and kept.addresses == []
    kept.serves("replica-2", "b:1")
    assert kept.addresses == ["b:1"]


def test_a_server_that_ends_is_replaced_at_once() -> None:
    kept = started()
    kept.ended("replica-1", 5.0)
    assert kept.addresses == ["replica-2:1"]
    assert kept.decide(5.0) == [StartReplica("replica-3")]


def test_a_server_that_never_serves_is_tried_after_longer_and_longer_pauses() -> None:
    kept = plan(1, 1)
    now, pauses = 0.0, []
    (action,) = kept.decide(now)
    for _ in range(8):
        kept.ended(action.name, now)
        failed = now
        while not (actions := kept.decide(now)):
            now += 0.5
        (action,) = actions
        pauses.append(now - failed)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    kept.serves(action.name, "a:1")
    kept.ended(action.name, now)
    # it did serve, so nothing is wrong with it
    assert kept.decide(now) == [StartReplica("replica-10")]


def test_after_a_failure_one_alone_tries() -> None:
    kept = plan(3, 3)
    for action in kept.decide(0.0):
        kept.ended(action.name, 0.0)
    assert kept.decide(100.0) == [StartReplica("replica-4")]
    kept.serves("replica-4", "a:1")
    assert kept.decide(101.0) == [StartReplica("replica-5"), StartReplica("replica-6")]


def test_load_brings_a_server_and_calm_sends_the_youngest_away() -> None:
    kept = started(2, 3)
    for name in kept.names:
        kept.loaded(name, BUSY)
    assert [kept.decide(float(now)) for now in range(1, 12)][-1] == [StartReplica("replica-3")]
    kept.serves("replica-3", "c:1")
    for name in kept.names:
        kept.loaded(name, IDLE)
    for now in range(12, 23):
        assert kept.decide(float(now)) == []
    assert kept.phase("replica-3") is Phase.LEAVING
    assert kept.addresses == ["replica-1:1", "replica-2:1"]  # fronts have time to read it
    assert kept.decide(22 + NOTICE_S) == [StopReplica("replica-3")]
    assert kept.decide(22 + NOTICE_S + 1) == []
    kept.ended("replica-3", 30.0)
    assert kept.decide(30.0) == []


def test_closing_has_all_leave_and_nobody_come() -> None:
    kept = started()
    kept.ended("replica-1", 1.0)
    assert kept.decide(1.0) == [StartReplica("replica-3")]
    kept.close()
    # it has not served yet: nobody knows of it
    assert kept.decide(2.0) == [StopReplica("replica-3")]
    kept.ended("replica-3", 2.0)
    assert kept.addresses == []
    assert kept.decide(2.0 + NOTICE_S) == [StopReplica("replica-2")]
    kept.ended("replica-2", 9.0)
    assert kept.names == [] and kept.decide(100.0) == []


def test_a_server_that_serves_after_it_was_told_to_stop_is_not_named() -> None:
    kept = plan(1, 1)
    kept.decide(0.0)
    kept.close()
    assert kept.decide(0.0) == [StopReplica("replica-1")]
    kept.serves("replica-1", "a:1")
    assert kept.addresses == []


def test_cached_prefixes_do_not_count_as_load() -> None:
    page = """# TYPE tgi_queue_size gauge
tgi_queue_size 3
tgi_batch_current_size 8
tgi_kv_blocks_total 100
tgi_kv_blocks_free 20
tgi_prefix_cache_blocks 30
tgi_route_requests{route="/"} 1
"""
    assert read_load(page) == ReplicaLoad(3, 8, 0.5)
    assert read_load("") == ReplicaLoad(0, 0, 0.0)
