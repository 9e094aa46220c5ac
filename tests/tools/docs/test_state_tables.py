"""Pictures and tables of states have every transition of the code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tgi_trio.router.http.wire import states as wire
from tgi_trio.router.scheduling import lifecycle
from tgi_trio.router.shards import group_states
from tools.docs.state_tables import (
    Transitions,
    sequence_lifecycle,
    shard_lifecycle,
    wire_states,
)


@pytest.mark.parametrize(
    ("draw", "transitions"),
    [
        (sequence_lifecycle, lifecycle.TRANSITIONS),
        (shard_lifecycle, group_states.TRANSITIONS),
        (wire_states, wire.TRANSITIONS),
    ],
)
def test_a_picture_has_every_transition(draw: Callable[[], str], transitions: Transitions) -> None:
    drawn = draw()
    for (state, event), target in transitions.items():
        assert f"    {state.name} --> {target.name}: {event.value}\n" in drawn


def test_a_sequence_has_a_row_per_state() -> None:
    rows = [line for line in sequence_lifecycle().splitlines() if line.startswith("| **")]
    assert [row.split("**")[1] for row in rows] == [s.name for s in lifecycle.SequenceState]


def test_a_connection_has_a_row_per_event_with_its_moves() -> None:
    rows = {
        line.split("**")[1]: line for line in wire_states().splitlines() if line.startswith("| **")
    }
    assert list(rows) == [event.name for event in wire.WireEvent]
    for (state, event), target in wire.TRANSITIONS.items():
        assert f"{state.name} → {target.name}" in rows[event.name]
