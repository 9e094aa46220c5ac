"""Where an adapter may be, and what moves it."""

from __future__ import annotations

import pytest

from tgi_trio.router.adapters.adapter_states import (
    TRANSITIONS,
    AdapterEvent,
    AdapterState,
    IllegalAdapterEvent,
    next_state,
)


def test_the_table_is_whole() -> None:
    assert {state for state, _ in TRANSITIONS} == set(AdapterState)
    assert {event for _, event in TRANSITIONS} == set(AdapterEvent)
    with pytest.raises(IllegalAdapterEvent, match="LOADED is not possible in ABSENT"):
        next_state(AdapterState.ABSENT, AdapterEvent.LOADED)
