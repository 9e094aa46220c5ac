"""The life of a sequence as one literal table; whatever is not in it raises.

`docs/architecture.md` draws its table and its diagram from here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # in the queue; owns no block
    PREFILLING = "prefilling"  # sent to the shard; its tokens are being computed
    RUNNING = "running"  # the shard generates tokens for it, step after step
    PREEMPTED = "preempted"  # pushed out for want of memory; a step may still touch its blocks
    LEAVING = "leaving"  # over for its client; a step may still touch its blocks
    FINISHED = "finished"  # owns nothing, is forgotten

    # enum's own __hash__ is Python code; identity is what a table lookup needs
    __hash__ = object.__hash__


class Event(enum.Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"  # the scheduler sends it in a PREFILL
    COMPUTE = "compute"  # a step reports its whole prompt computed
    END = "end"  # a step reports EOS or the length limit: the shard has dropped it
    FAIL = "fail"  # the shard reports that it failed alone: the shard has dropped it
    LEAVE = "leave"  # the client left, a stop string was hit or the deadline passed
    PREEMPT = "preempt"  # its blocks are needed by an older sequence
    ACKNOWLEDGE = "acknowledge"  # a step answers the FILTER that names it
    LOSE = "lose"  # the shard is gone and its blocks with it

    __hash__ = object.__hash__


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.PREFILLING,
    (State.WAITING, Event.LEAVE): State.FINISHED,
    (State.PREFILLING, Event.COMPUTE): State.RUNNING,
    (State.PREFILLING, Event.LEAVE): State.LEAVING,
    (State.PREFILLING, Event.PREEMPT): State.PREEMPTED,
    (State.PREFILLING, Event.FAIL): State.FINISHED,
    (State.PREFILLING, Event.LOSE): State.WAITING,
    (State.RUNNING, Event.END): State.FINISHED,
    (State.RUNNING, Event.LEAVE): State.LEAVING,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Event.FAIL): State.FINISHED,
    (State.RUNNING, Event.LOSE): State.WAITING,
    (State.PREEMPTED, Event.ACKNOWLEDGE): State.WAITING,
    (State.PREEMPTED, Event.END): State.FINISHED,
    (State.PREEMPTED, Event.LEAVE): State.LEAVING,
    (State.PREEMPTED, Event.FAIL): State.FINISHED,
    (State.PREEMPTED, Event.LOSE): State.WAITING,
    (State.LEAVING, Event.ACKNOWLEDGE): State.FINISHED,
    (State.LEAVING, Event.END): State.FINISHED,
    (State.LEAVING, Event.FAIL): State.FINISHED,
    (State.LEAVING, Event.LOSE): State.FINISHED,
}

#: States in which the shard may know the sequence and its blocks may be touched by a step.
HELD = frozenset({State.PREFILLING, State.RUNNING, State.PREEMPTED, State.LEAVING})


class IllegalTransition(Exception):
    """A bug of ours: an event came in a state that has no row for it."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"a sequence that is {state.name} cannot {event.name}")
        self.state = state
        self.event = event


def following(state: State, event: Event) -> State:
    """Return the state after `event`; raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def markdown() -> str:
    """Return the table as Markdown: a row per state, a column per event."""
    events = list(Event)
    lines = [
        "| | " + " | ".join(event.name for event in events) + " |",
        "|---" * (len(events) + 1) + "|",
    ]
    for state in State:
        cells = [TRANSITIONS.get((state, event)) for event in events]
        names = " | ".join(cell.name if cell else "–" for cell in cells)  # noqa: RUF001
        lines.append(f"| **{state.name}** | {names} |")
    return "\n".join(lines) + "\n"


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.name}"]
    for (state, event), target in TRANSITIONS.items():
        lines.append(f"    {state.name} --> {target.name}: {event.value}")
    lines.append(f"    {State.FINISHED.name} --> [*]")
    return "\n".join(lines) + "\n"
