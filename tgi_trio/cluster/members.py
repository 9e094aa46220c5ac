"""Failure detection: the state of each of the front's replicas. No clock, no I/O.

There are two levels of suspicion. A replica that has been silent for `late` seconds is SUSPECT: it
gets no new requests, and those that run there go on. Only after `timeout` seconds without a byte on
any of its connections is it DEAD, and its requests move to other replicas. Two levels, because
under load health checks are answered late while tokens still flow: new requests should not wait for
a replica that may be dead, nor running ones be moved off one that is only slow. A refused
connection means DEAD at once.

Time in which nobody called `tick` (the front itself did not run) does not count as silence.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


class MemberState(enum.Enum):
    """A replica's state."""

    NEW = "new"  # named, has not answered yet
    UP = "up"  # serves
    SUSPECT = "suspect"  # late or unwell: no new requests, running ones go on
    DEAD = "dead"  # silent or gone: its requests move to other replicas
    LEAVING = "leaving"  # no longer named: no new requests, running ones may finish
    GONE = "gone"  # forgotten

    # enum's own __hash__ is slow Python code; table look-ups need identity only
    __hash__ = object.__hash__


class MemberEvent(enum.Enum):
    """What can happen to a replica."""

    WELL = "well"  # its health check says that it serves
    UNWELL = "unwell"  # its health check says that it does not serve now
    CUT = "cut"  # a connection ended in the middle of an answer
    LATE = "late"  # nothing was heard for `late` seconds
    SILENT = "silent"  # nothing was heard for `timeout` seconds
    CLOSED = "closed"  # nobody listens there
    NAME = "name"  # it is named again
    DISMISS = "dismiss"  # it is no longer named
    EMPTY = "empty"  # no request runs there any more

    __hash__ = object.__hash__


_NEW, _UP, _SUSPECT = MemberState.NEW, MemberState.UP, MemberState.SUSPECT
_DEAD, _LEAVING, _GONE = MemberState.DEAD, MemberState.LEAVING, MemberState.GONE

TRANSITIONS: Mapping[tuple[MemberState, MemberEvent], MemberState] = {
    (_NEW, MemberEvent.WELL): _UP,
    (_NEW, MemberEvent.UNWELL): _SUSPECT,
    (_NEW, MemberEvent.CUT): _NEW,
    (_NEW, MemberEvent.LATE): _NEW,
    (_NEW, MemberEvent.SILENT): _DEAD,
    (_NEW, MemberEvent.CLOSED): _DEAD,
    (_NEW, MemberEvent.DISMISS): _GONE,
    (_UP, MemberEvent.WELL): _UP,
    (_UP, MemberEvent.UNWELL): _SUSPECT,
    (_UP, MemberEvent.CUT): _SUSPECT,
    (_UP, MemberEvent.LATE): _SUSPECT,
    (_UP, MemberEvent.SILENT): _DEAD,
    (_UP, MemberEvent.CLOSED): _DEAD,
    (_UP, MemberEvent.DISMISS): _LEAVING,
    (_SUSPECT, MemberEvent.WELL): _UP,
    (_SUSPECT, MemberEvent.UNWELL): _SUSPECT,
    (_SUSPECT, MemberEvent.CUT): _SUSPECT,
    (_SUSPECT, MemberEvent.LATE): _SUSPECT,
    (_SUSPECT, MemberEvent.SILENT): _DEAD,
    (_SUSPECT, MemberEvent.CLOSED): _DEAD,
    (_SUSPECT, MemberEvent.DISMISS): _LEAVING,
    (_DEAD, MemberEvent.WELL): _UP,
    (_DEAD, MemberEvent.UNWELL): _SUSPECT,
    (_DEAD, MemberEvent.CUT): _DEAD,
    (_DEAD, MemberEvent.LATE): _DEAD,
    (_DEAD, MemberEvent.SILENT): _DEAD,
    (_DEAD, MemberEvent.CLOSED): _DEAD,
    (_DEAD, MemberEvent.DISMISS): _GONE,
    (_LEAVING, MemberEvent.WELL): _LEAVING,
    (_LEAVING, MemberEvent.UNWELL): _LEAVING,
    (_LEAVING, MemberEvent.CUT): _LEAVING,
    (_LEAVING, MemberEvent.LATE): _LEAVING,
    (_LEAVING, MemberEvent.SILENT): _GONE,
    (_LEAVING, MemberEvent.CLOSED): _GONE,
    (_LEAVING, MemberEvent.NAME): _NEW,
    (_LEAVING, MemberEvent.EMPTY): _GONE,
}


class IllegalMemberEvent(Exception):
    """A bug of ours: the table has no row for this event in this state."""

    def __init__(self, state: MemberState, event: MemberEvent) -> None:
        super().__init__(f"a replica that is {state.name} cannot be told {event.name}")
        self.state = state
        self.event = event


def next_state(state: MemberState, event: MemberEvent) -> MemberState:
    """Return the state after `event`; raises IllegalMemberEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalMemberEvent(state, event) from None


@dataclass(slots=True)
class Member:
    """One replica."""

    name: str  # its address
    state: MemberState
    heard: float  # when its last byte arrived, seconds
    well: bool = False  # what its last health check said

    @property
    def expected(self) -> bool:
        """Whether it takes requests, or most probably will at once: it is late, not unwell."""
        return self.state is _UP or (self.state is _SUSPECT and self.well)


OnChange = Callable[[Member, MemberState], None]  # the member and its previous state


class Members:
    """The replicas that a front knows. All times are seconds of the caller's clock."""

    def __init__(self, timeout: float, on_change: OnChange) -> None:
        """`timeout`: seconds of silence after which a replica is dead.

        `on_change` is called, synchronously, whenever a replica's state has changed.
        """
        self.timeout = timeout
        self.interval = timeout / 8  # between two health checks of a replica
        self.late = 2.5 * self.interval  # two answers are missing
        self._on_change = on_change
        self._members: dict[str, Member] = {}
        self._ticked: float | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def find(self, name: str) -> Member | None:
        """Return a replica; None if there is none of that name."""
        return self._members.get(name)

    def count(self, state: MemberState) -> int:
        """Return how many replicas are in a state."""
        return sum(member.state is state for member in self._members.values())

    def name(self, name: str, now: float) -> None:
        """Add a replica. One that is present stays as it is; one that was leaving is NEW again."""
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = Member(name, _NEW, now)
            self._on_change(member, _GONE)
        elif member.state is _LEAVING:
            member.heard = now
            self._move(member, MemberEvent.NAME)

    def dismiss(self, name: str) -> None:
        """Remove a replica, once its requests are done. Unknown and leaving ones are ignored."""
        member = self._members.get(name)
        if member is not None and member.state is not _LEAVING:
            self._move(member, MemberEvent.DISMISS)

    def tell(self, name: str, event: MemberEvent, now: float) -> None:
        """Apply an event to a replica; ignored if it is gone by now."""
        member = self._members.get(name)
        if member is None:
            return
        if event in (MemberEvent.WELL, MemberEvent.UNWELL):
            member.heard = now
            member.well = event is MemberEvent.WELL
        self._move(member, event)

    def tick(self, now: float) -> None:
        """Look for silent replicas. To be called at every `interval`."""
        away = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        blameless = away - self.interval if away > 2 * self.interval else 0.0
        for member in list(self._members.values()):
            member.heard += blameless
            silence = now - member.heard
            if silence > self.timeout:
                self._move(member, MemberEvent.SILENT)
            elif silence > self.late:
                self._move(member, MemberEvent.LATE)

    def _move(self, member: Member, event: MemberEvent) -> None:
        before = member.state
        member.state = next_state(before, event)
        if member.state is _GONE:
            del self._members[member.name]
        if member.state is not before:
            self._on_change(member, before)
