"""The table of a sequence's life."""

from __future__ import annotations

import pytest

from tgi_trio.router.scheduling.lifecycle import (
    HELD,
    TRANSITIONS,
    IllegalSequenceEvent,
    SequenceEvent,
    SequenceState,
    next_state,
)


def test_every_pair_is_in_the_table_or_raises_naming_both() -> None:
    for state in SequenceState:
        for event in SequenceEvent:
            if (state, event) in TRANSITIONS:
                assert next_state(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalSequenceEvent, match=f"{state.name} cannot {event.name}"):
                    next_state(state, event)


def test_finished_is_final_and_reached_from_everywhere() -> None:
    reaches = {SequenceState.FINISHED}
    while more := {s for (s, _), t in TRANSITIONS.items() if t in reaches} - reaches:
        reaches |= more
    assert reaches == set(SequenceState)
    assert not any(state is SequenceState.FINISHED for state, _ in TRANSITIONS)


def test_leaving_is_legal_wherever_a_client_can_leave() -> None:
    clients = set(SequenceState) - {SequenceState.LEAVING, SequenceState.FINISHED}
    assert {state for state, event in TRANSITIONS if event is SequenceEvent.LEAVE} == clients


def test_whatever_the_shard_holds_can_be_lost() -> None:
    assert {state for state, event in TRANSITIONS if event is SequenceEvent.LOSE} == HELD
