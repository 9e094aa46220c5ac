"""Sequences that have ended are forgotten, whatever ended them."""

from __future__ import annotations

from tests.router.scheduling.harness import LIMITS, Pair, request
from tgi_trio.ipc.messages import Fault
from tgi_trio.router.scheduling import Scheduler


def test_sequences_that_have_ended_are_kept_for_one_report_at_most() -> None:
    """There may be no report for long: while a shard loads, or where every step fails."""
    scheduler = Scheduler(LIMITS)
    for id in range(100):  # clients that give up before a shard is there
        scheduler.add(id, request(4, 5), 0.0)
        scheduler.abort(id, 0.0)
        assert scheduler.find(id) is None
    pair = Pair(LIMITS)
    for id in range(100):
        pair.scheduler.add(id, request(4, 5), 0.0)
        pair.send()
        pair.shard.rows.clear()
        assert pair.scheduler.fault([Fault(id, "bad kernel")], pair.shard.applied, 0.0) == [id]
        assert [each for each in range(id + 1) if pair.scheduler.find(each)] == [id]
    pair.scheduler.shard_lost(0.0)
    assert pair.scheduler.find(99) is None
