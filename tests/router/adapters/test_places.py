"""Where an adapter may be, and what moves it."""

from __future__ import annotations

import pytest

from tgi_trio.router.adapters.places import (
    TRANSITIONS,
    IllegalPlaceTransition,
    Place,
    PlaceEvent,
    next_place,
)


def test_the_table_is_whole() -> None:
    assert {place for place, _ in TRANSITIONS} == set(Place)
    assert {event for _, event in TRANSITIONS} == set(PlaceEvent)
    with pytest.raises(IllegalPlaceTransition, match="LOADED is not possible in ABSENT"):
        next_place(Place.ABSENT, PlaceEvent.LOADED)
