"""A shard in a thread of this process, held in a step until the test has said what it has to."""

from __future__ import annotations

import threading

import pytest

from tgi_trio.ipc.channel import ShardEnd

_PATIENCE_S = 120.0


def hold_step(monkeypatch: pytest.MonkeyPatch, number: int) -> threading.Event:
    """Have shards wait at the beginning of a step, counted from 1, until the event is set.

    The step has been planned by then: commands that are sent meanwhile are for those that follow,
    however late the test's thread gets to run.
    """
    beat, go_on = ShardEnd.beat, threading.Event()

    def wait(end: ShardEnd, step: int, phase: int) -> None:
        beat(end, step, phase)
        if step == number:
            go_on.wait(_PATIENCE_S)

    monkeypatch.setattr(ShardEnd, "beat", wait)
    return go_on
