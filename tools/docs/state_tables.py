"""The tables of states that the code follows, as Mermaid diagrams and as Markdown tables."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tgi_trio.cluster import members
from tgi_trio.router.http.wire import states as wire
from tgi_trio.router.scheduling import lifecycle
from tgi_trio.router.shards import group_states
from tools.docs.markdown import Sections, code, table

Transitions = Mapping[tuple[Any, Any], enum.Enum]  # (state, event) -> the state after it


def draw_states(
    transitions: Transitions, begins: Iterable[enum.Enum], end: enum.Enum | None = None
) -> str:
    """Return a table of transitions as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {state.name}" for state in begins)]
    for (state, event), target in transitions.items():
        lines.append(f"    {state.name} --> {target.name}: {event.value}")
    if end is not None:
        lines.append(f"    {end.name} --> [*]")
    return code(lines, "mermaid")


def shard_lifecycle() -> str:
    """Return the states of a shard group."""
    return draw_states(group_states.TRANSITIONS, [group_states.ShardState.SPAWNED])


def sequence_lifecycle() -> str:
    """Return the states of a sequence; in the table a row per state, a column per event."""
    picture = draw_states(
        lifecycle.TRANSITIONS,
        [lifecycle.SequenceState.WAITING],
        lifecycle.SequenceState.FINISHED,
    )
    events = list(lifecycle.SequenceEvent)
    lines = [
        "| | " + " | ".join(event.name for event in events) + " |",
        "|---" * (len(events) + 1) + "|",
    ]
    for state in lifecycle.SequenceState:
        cells = [lifecycle.TRANSITIONS.get((state, event)) for event in events]
        names = " | ".join(cell.name if cell else "–" for cell in cells)  # noqa: RUF001
        lines.append(f"| **{state.name}** | {names} |")
    return f"{picture}\n" + "\n".join(lines) + "\n"


def member_states() -> str:
    """Return the states of a replica, as the front sees it."""
    return draw_states(members.TRANSITIONS, [members.MemberState.NEW], members.MemberState.GONE)


def wire_states() -> str:
    """Return the states of an HTTP/1.1 connection; in the table a row per event, with its moves."""
    picture = draw_states(
        wire.TRANSITIONS, [wire.CLIENT_BEGINS, wire.SERVER_BEGINS], wire.WireState.CLOSED
    )
    rows = [
        (
            f"**{event.name}**",
            ", ".join(
                f"{state.name} → {target.name}"
                for (state, each), target in wire.TRANSITIONS.items()
                if each is event
            ),
        )
        for event in wire.WireEvent
    ]
    return f"{picture}\n{table(('event', 'moves'), rows)}"


SECTIONS: Final[Sections] = {
    "shard-lifecycle": shard_lifecycle,
    "sequence-lifecycle": sequence_lifecycle,
    "member-states": member_states,
    "wire-states": wire_states,
}
