"""Replicas are suspected early, given up late, and never for the front's own delays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.members import (
    TRANSITIONS,
    IllegalMemberEvent,
    Member,
    MemberEvent,
    Members,
    MemberState,
    next_state,
)

Change = tuple[str, MemberState, MemberState]

# Events that may come whatever the state; NAME, DISMISS and EMPTY have their time.
_NEWS = [MemberEvent.WELL, MemberEvent.UNWELL, MemberEvent.CUT, MemberEvent.CLOSED]


class Watched:
    """Members with a clock of their own, and all that `on_change` was told."""

    def __init__(self, timeout: float = 4.0) -> None:
        self.now = 100.0
        self.changes: list[Change] = []
        self.members = Members(timeout, self._note)

    def _note(self, member: Member, before: MemberState) -> None:
        self.changes.append((member.name, before, member.state))

    def pass_time(self, seconds: float, *answering: str) -> None:
        """Tick at every interval; `answering` say each time that they are well."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.members.interval
            for name in answering:
                self.members.tell(name, MemberEvent.WELL, self.now)
            self.members.tick(self.now)

    def state(self, name: str) -> MemberState | None:
        member = self.members.find(name)
        return None if member is None else member.state

    def start(self, *names: str) -> None:
        for name in names:
            self.members.name(name, self.now)
            self.members.tell(name, MemberEvent.WELL, self.now)


def test_a_replica_serves_once_it_has_answered() -> None:
    watched = Watched()
    watched.members.name("a", watched.now)
    assert watched.state("a") is MemberState.NEW
    watched.members.tell("a", MemberEvent.WELL, watched.now)
    assert watched.changes == [
        ("a", MemberState.GONE, MemberState.NEW),
        ("a", MemberState.NEW, MemberState.UP),
    ]


def test_silence_is_suspect_early_and_dead_late() -> None:
    watched = Watched(timeout=4.0)
    watched.start("a", "b")
    watched.pass_time(2.0, "b")
    assert (watched.state("a"), watched.state("b")) == (MemberState.SUSPECT, MemberState.UP)
    watched.pass_time(1.5, "b")
    assert watched.state("a") is MemberState.SUSPECT
    watched.pass_time(1.5, "b")
    assert (watched.state("a"), watched.state("b")) == (MemberState.DEAD, MemberState.UP)


def test_bytes_of_a_stream_are_life_enough() -> None:
    watched = Watched(timeout=4.0)
    watched.start("a")
    member = watched.members.find("a")
    assert member is not None
    for _ in range(20):
        member.heard = watched.now
        watched.pass_time(1.0)
    assert watched.state("a") is MemberState.UP


def test_the_fronts_own_absence_is_nobodys_fault() -> None:
    watched = Watched(timeout=4.0)
    watched.start("a")
    watched.pass_time(1.0, "a")
    watched.now += 60.0  # the front's process was stopped, or starved
    watched.members.tick(watched.now)
    assert watched.state("a") is MemberState.UP
    watched.pass_time(6.0)  # what comes behind it counts
    assert watched.state("a") is MemberState.DEAD


@pytest.mark.parametrize("before", [MemberState.UP, MemberState.SUSPECT, MemberState.DEAD])
def test_nobody_listens_means_dead_at_once(before: MemberState) -> None:
    assert next_state(before, MemberEvent.CLOSED) is MemberState.DEAD


def test_the_dead_come_back() -> None:
    watched = Watched()
    watched.start("a")
    watched.members.tell("a", MemberEvent.CLOSED, watched.now)
    assert watched.state("a") is MemberState.DEAD
    watched.members.tell("a", MemberEvent.UNWELL, watched.now)
    assert watched.state("a") is MemberState.SUSPECT
    watched.members.tell("a", MemberEvent.WELL, watched.now)
    assert watched.state("a") is MemberState.UP


def test_who_is_no_longer_named_ends_what_it_has() -> None:
    watched = Watched()
    watched.start("a", "b")
    watched.members.dismiss("a")
    watched.members.name("c", watched.now)
    assert [watched.state(name) for name in "abc"] == [
        MemberState.LEAVING,
        MemberState.UP,
        MemberState.NEW,
    ]
    watched.members.tell("a", MemberEvent.WELL, watched.now)
    assert watched.state("a") is MemberState.LEAVING
    watched.members.dismiss("a")  # again: nothing
    watched.members.tell("a", MemberEvent.EMPTY, watched.now)
    assert watched.state("a") is None
    assert len(watched.members) == 2


def test_who_is_named_again_while_leaving_starts_anew() -> None:
    watched = Watched()
    watched.start("a")
    watched.members.dismiss("a")
    watched.members.name("a", watched.now)
    assert watched.state("a") is MemberState.NEW


def test_news_of_those_who_are_gone_are_nothing() -> None:
    watched = Watched()
    watched.members.tell("a", MemberEvent.CUT, watched.now)
    watched.members.dismiss("a")
    assert watched.changes == []


def test_what_is_not_in_the_table_is_a_bug() -> None:
    with pytest.raises(IllegalMemberEvent, match="UP cannot be told EMPTY"):
        next_state(MemberState.UP, MemberEvent.EMPTY)


def test_every_state_can_be_left_and_reached() -> None:
    inside = [state for state in MemberState if state is not MemberState.GONE]
    assert {state for state, _ in TRANSITIONS} == set(inside)
    reached = {after for (before, _), after in TRANSITIONS.items() if before is not after}
    assert reached == set(MemberState)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["name", "dismiss", "pass", *_NEWS]),
        ),
        max_size=40,
    )
)
def test_changes_tell_the_whole_story(steps: list[tuple[str, str | MemberEvent]]) -> None:
    """Whoever follows `on_change` alone knows every state."""
    watched = Watched()
    for name, step in steps:
        if isinstance(step, MemberEvent):
            watched.members.tell(name, step, watched.now)
        elif step == "name":
            watched.members.name(name, watched.now)
        elif step == "dismiss":
            watched.members.dismiss(name)
        else:
            watched.pass_time(1.0)
    known: dict[str, MemberState] = {}
    for name, before, after in watched.changes:
        assert known.get(name, MemberState.GONE) is before
        known[name] = after
    gone = {name for name, state in known.items() if state is MemberState.GONE}
    assert {m.name: m.state for m in watched.members} == {
        name: state for name, state in known.items() if name not in gone
    }
