"""Where a served adapter is, as one literal table."""

from __future__ import annotations

import enum


class Place(enum.Enum):
    """Where an adapter is."""

    ABSENT = "absent"  # from the shard's memory
    LOADING = "loading"  # ordered of the shard
    RESIDENT = "resident"
    LEAVING = "leaving"  # as resident for requests that have it; new ones wait, others need room


class PlaceEvent(enum.Enum):
    """What moves it."""

    ORDER = "order"  # there is room: the shard is to load it
    LOADED = "loaded"
    FAILED = "failed"  # the shard could not load it
    YIELD = "yield"  # its requests in hand are its last: another has waited too long
    STAY = "stay"  # nobody waits for its room any more
    DROP = "drop"  # the shard is to forget it


_P, _E = Place, PlaceEvent

TRANSITIONS: dict[tuple[Place, PlaceEvent], Place] = {
    (_P.ABSENT, _E.ORDER): _P.LOADING,
    (_P.LOADING, _E.LOADED): _P.RESIDENT,
    (_P.LOADING, _E.FAILED): _P.ABSENT,
    (_P.LOADING, _E.DROP): _P.ABSENT,
    (_P.RESIDENT, _E.LOADED): _P.RESIDENT,  # by the next incarnation of the shard
    (_P.RESIDENT, _E.FAILED): _P.ABSENT,
    (_P.RESIDENT, _E.YIELD): _P.LEAVING,
    (_P.RESIDENT, _E.DROP): _P.ABSENT,
    (_P.LEAVING, _E.LOADED): _P.LEAVING,
    (_P.LEAVING, _E.FAILED): _P.ABSENT,
    (_P.LEAVING, _E.STAY): _P.RESIDENT,
    (_P.LEAVING, _E.DROP): _P.ABSENT,
}


class IllegalPlaceTransition(Exception):
    """An event that the table does not allow in this place: a bug in the registry."""


def next_place(place: Place, event: PlaceEvent) -> Place:
    """Return where an adapter is after `event`; raises IllegalPlaceTransition naming both."""
    try:
        return TRANSITIONS[place, event]
    except KeyError:
        raise IllegalPlaceTransition(f"{event.name} is not possible in {place.name}") from None
