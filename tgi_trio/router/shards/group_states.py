"""The states of a shard group as one table; docs/operations/stop.md has a diagram made from it."""

from __future__ import annotations

import enum


class ShardState(enum.Enum):
    """A shard group's state."""

    SPAWNED = "spawned"  # processes exist, no HELLO yet
    LOADING = "loading"  # reading weights
    WARMING = "warming"  # sizing the KV cache
    READY = "ready"  # steps advance when there is work
    STALLED = "stalled"  # there is work and no step for too long
    DRAINING = "draining"  # told to finish and exit
    GONE = "gone"  # every process has exited


class ShardEvent(enum.Enum):
    """What can happen to a shard group."""

    HELLO = "hello"
    LOADED = "loaded"
    WARMED = "warmed"
    NO_STEP = "no step in time"
    STEP = "step"
    DRAIN = "drain"
    EXIT = "exit"
    RESPAWN = "respawn"


_S, _E = ShardState, ShardEvent

TRANSITIONS: dict[tuple[ShardState, ShardEvent], ShardState] = {
    (_S.SPAWNED, _E.HELLO): _S.LOADING,
    (_S.LOADING, _E.LOADED): _S.WARMING,
    (_S.WARMING, _E.WARMED): _S.READY,
    (_S.READY, _E.NO_STEP): _S.STALLED,
    (_S.STALLED, _E.STEP): _S.READY,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.STALLED, _E.DRAIN): _S.DRAINING,
    (_S.SPAWNED, _E.EXIT): _S.GONE,
    (_S.LOADING, _E.EXIT): _S.GONE,
    (_S.WARMING, _E.EXIT): _S.GONE,
    (_S.READY, _E.EXIT): _S.GONE,
    (_S.STALLED, _E.EXIT): _S.GONE,
    (_S.DRAINING, _E.EXIT): _S.GONE,
    (_S.GONE, _E.RESPAWN): _S.SPAWNED,
}


class IllegalShardEvent(Exception):
    """An event that the table does not allow in this state: a bug in the supervisor."""


def next_state(state: ShardState, event: ShardEvent) -> ShardState:
    """Return the state that follows; raises IllegalShardEvent naming both."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalShardEvent(f"{event.name} is not possible in {state.name}") from None
