"""The states of a sequence as one table of transitions; whatever is not in it raises.

The table and the diagram in `docs/architecture.md` are generated from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class SequenceState(enum.Enum):
    """A sequence's state."""

    WAITING = "waiting"  # in the queue; owns no block
    PREFILLING = "prefilling"  # sent to the shard; its tokens are being computed
    RUNNING = "running"  # the shard generates tokens for it, step after step
    PREEMPTED = "preempted"  # off the shard for lack of memory; a step may still touch its blocks
    LEAVING = "leaving"  # over for its client; a step may still touch its blocks
    FINISHED = "finished"  # owns nothing, is forgotten

    # enum's own __hash__ is slow Python code; table look-ups need identity only
    __hash__ = object.__hash__


class SequenceEvent(enum.Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"  # the scheduler sends it in a PREFILL
    COMPUTE = "compute"  # a step has computed the whole prompt
    END = "end"  # a step reports EOS or the length limit: the shard has dropped it
    FAIL = "fail"  # the shard reports that its step failed: the shard has dropped it
    LEAVE = "leave"  # the client left, a stop string was hit or the deadline passed
    PREEMPT = "preempt"  # its blocks are needed by an older sequence
    ACKNOWLEDGE = "acknowledge"  # a step answers the FILTER that names it
    LOSE = "lose"  # the shard is gone and its blocks with it

    __hash__ = object.__hash__


TRANSITIONS: Mapping[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.PREFILLING,
    (SequenceState.WAITING, SequenceEvent.LEAVE): SequenceState.FINISHED,
    (SequenceState.PREFILLING, SequenceEvent.COMPUTE): SequenceState.RUNNING,
    (SequenceState.PREFILLING, SequenceEvent.LEAVE): SequenceState.LEAVING,
    (SequenceState.PREFILLING, SequenceEvent.PREEMPT): SequenceState.PREEMPTED,
    (SequenceState.PREFILLING, SequenceEvent.FAIL): SequenceState.FINISHED,
    (SequenceState.PREFILLING, SequenceEvent.LOSE): SequenceState.WAITING,
    (SequenceState.RUNNING, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.RUNNING, SequenceEvent.LEAVE): SequenceState.LEAVING,
    (SequenceState.RUNNING, SequenceEvent.PREEMPT): SequenceState.PREEMPTED,
    (SequenceState.RUNNING, SequenceEvent.FAIL): SequenceState.FINISHED,
    (SequenceState.RUNNING, SequenceEvent.LOSE): SequenceState.WAITING,
    (SequenceState.PREEMPTED, SequenceEvent.ACKNOWLEDGE): SequenceState.WAITING,
    (SequenceState.PREEMPTED, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.PREEMPTED, SequenceEvent.LEAVE): SequenceState.LEAVING,
    (SequenceState.PREEMPTED, SequenceEvent.FAIL): SequenceState.FINISHED,
    (SequenceState.PREEMPTED, SequenceEvent.LOSE): SequenceState.WAITING,
    (SequenceState.LEAVING, SequenceEvent.ACKNOWLEDGE): SequenceState.FINISHED,
    (SequenceState.LEAVING, SequenceEvent.END): SequenceState.FINISHED,
    (SequenceState.LEAVING, SequenceEvent.FAIL): SequenceState.FINISHED,
    (SequenceState.LEAVING, SequenceEvent.LOSE): SequenceState.FINISHED,
}

#: States in which the shard may know the sequence and its blocks may be touched by a step.
HELD = frozenset(
    {
        SequenceState.PREFILLING,
        SequenceState.RUNNING,
        SequenceState.PREEMPTED,
        SequenceState.LEAVING,
    }
)


class IllegalSequenceEvent(Exception):
    """A bug of ours: the table has no row for this event in this state."""

    def __init__(self, state: SequenceState, event: SequenceEvent) -> None:
        super().__init__(f"a sequence that is {state.name} cannot {event.name}")
        self.state = state
        self.event = event


def next_state(state: SequenceState, event: SequenceEvent) -> SequenceState:
    """Return the state after `event`; raises IllegalSequenceEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalSequenceEvent(state, event) from None
