"""The states of a served adapter as one table of transitions."""

from __future__ import annotations

import enum


class AdapterState(enum.Enum):
    """An adapter's state."""

    ABSENT = "absent"  # not in the shard's memory
    LOADING = "loading"  # the shard has been told to load it
    RESIDENT = "resident"  # in the shard's memory
    LEAVING = "leaving"  # resident for the requests that use it; new ones wait until it is reloaded


class AdapterEvent(enum.Enum):
    """What can happen to an adapter."""

    ORDER = "order"  # there is room: the shard is told to load it
    LOADED = "loaded"
    FAILED = "failed"  # the shard could not load it
    YIELD = "yield"  # it takes no new requests: another adapter has waited too long for room
    STAY = "stay"  # no adapter waits for room any more
    DROP = "drop"  # the shard is told to unload it


_P, _E = AdapterState, AdapterEvent

TRANSITIONS: dict[tuple[AdapterState, AdapterEvent], AdapterState] = {
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


class IllegalAdapterEvent(Exception):
    """An event that the table does not allow in this place: a bug in the registry."""


def next_state(state: AdapterState, event: AdapterEvent) -> AdapterState:
    """Return where an adapter is after `event`; raises IllegalAdapterEvent naming both."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalAdapterEvent(f"{event.name} is not possible in {state.name}") from None
