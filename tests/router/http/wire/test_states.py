"""The table of a connection's life, and what `Http1` makes of it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tgi_trio.router.http.wire.http1 import Http1, Refusal, RequestEnd, RequestHead
from tgi_trio.router.http.wire.states import (
    CLIENT_BEGINS,
    NOT_READ,
    SERVER_BEGINS,
    STILL_SENDING,
    TRANSITIONS,
    IllegalWireEvent,
    WireEvent,
    WireState,
    next_state,
)


def reachable(start: WireState) -> set[WireState]:
    """Return every state that a side which begins in `start` can come to."""
    found = {start}
    while more := {to for (state, _), to in TRANSITIONS.items() if state in found} - found:
        found |= more
    return found


CLIENT, SERVER = reachable(CLIENT_BEGINS), reachable(SERVER_BEGINS)


def test_every_pair_is_in_the_table_or_raises_naming_both() -> None:
    for state in WireState:
        for event in WireEvent:
            if (state, event) in TRANSITIONS:
                assert next_state(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalWireEvent, match=f"{state.name} cannot {event.name}$"):
                    next_state(state, event)


def test_the_sides_share_nothing_but_their_end() -> None:
    assert set(WireState) == CLIENT | SERVER
    assert {WireState.CLOSED} == CLIENT & SERVER
    assert CLIENT >= NOT_READ and CLIENT >= STILL_SENDING


def test_closed_is_final_and_one_event_away_from_everywhere() -> None:
    assert not any(state is WireState.CLOSED for state, _ in TRANSITIONS)
    for state in set(WireState) - {WireState.CLOSED}:
        assert next_state(state, WireEvent.CLOSE) is WireState.CLOSED


def test_a_goodbye_is_said_once_from_wherever_we_are() -> None:
    ours = SERVER - {WireState.DRAINING, WireState.CLOSED}
    assert {state for state, event in TRANSITIONS if event is WireEvent.LINGER} == ours


def test_nothing_of_http_is_heard_where_nothing_is_read() -> None:
    for state, event in TRANSITIONS:
        if state in NOT_READ:
            assert event is WireEvent.CLOSE


# ---- whatever a client and an application do ----------------------------------------------------

HEADS = {
    "1.1": b"POST / HTTP/1.1\r\nhost: t\r\n",
    "1.1, last": b"POST / HTTP/1.1\r\nhost: t\r\nconnection: close\r\n",
    "1.0": b"POST / HTTP/1.0\r\n",
    "upgrade": b"POST / HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: h2c\r\n",
}


class Conversation(RuleBasedStateMachine):
    """A client that says what it likes, and an application that answers in order."""

    @initialize()
    def connect(self) -> None:
        self.http1 = Http1()
        self.asked: list[RequestHead] = []  # not yet answered, the current one first
        self.heads = self.whole = 0  # requests that began, and that were whole
        self.refused = False
        self.ended = False

    def hear(self, data: bytes) -> None:
        for heard in self.http1.receive(data):
            assert not (self.refused or self.ended), "nothing is heard behind that"
            if isinstance(heard, RequestHead):
                self.asked.append(heard)
                self.heads += 1
            elif isinstance(heard, RequestEnd):
                self.whole += 1
            elif isinstance(heard, Refusal):
                self.refused = True

    @rule(kind=st.sampled_from(sorted(HEADS)), body=st.binary(max_size=9), cut=st.integers(0, 200))
    def ask(self, kind: str, body: bytes, cut: int) -> None:
        data = HEADS[kind] + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        self.hear(data[:cut])
        self.hear(data[cut:])

    @rule(kind=st.sampled_from(sorted(HEADS)), cut=st.integers(1, 100))
    def ask_in_part(self, kind: str, cut: int) -> None:
        self.hear((HEADS[kind] + b"content-length: 5\r\n\r\n12345")[:cut])

    @rule(data=st.binary(max_size=20))
    def talk_nonsense(self, data: bytes) -> None:
        self.hear(data)

    @precondition(lambda self: self.asked and self.http1.server is WireState.QUIET)
    @rule()
    def take_turn(self) -> None:
        self.http1.take_turn(self.asked[0])

    @precondition(lambda self: self.http1.server is WireState.ANSWERING)
    @rule(status=st.sampled_from([200, 204, 404, 599]), sized=st.booleans(), last=st.booleans())
    def start(self, status: int, sized: bool, last: bool) -> None:
        headers = [(b"content-length", b"3")] if sized else []
        head = self.http1.start_answer(status, headers, last)
        assert head.startswith(b"HTTP/1.1 %d " % status) and head.endswith(b"\r\n\r\n")
        says_so = b"connection: close\r\n" in head
        assert says_so == (self.http1.server is WireState.SENDING_LAST)
        assert says_so or not last

    @precondition(lambda self: self.http1.server is WireState.ANSWERING)
    @rule()
    def start_with_a_header_that_breaks_out(self) -> None:
        with pytest.raises(ValueError, match="CR, LF"):
            self.http1.start_answer(200, [(b"x", b"1\r\ny: 2")], last=False)
        assert self.http1.server is WireState.ANSWERING, "another answer is possible"

    @precondition(lambda self: self.http1.server in (WireState.SENDING, WireState.SENDING_LAST))
    @rule()
    def finish(self) -> None:
        was = self.http1.server
        answered = self.asked.pop(0)
        goes_on = self.http1.finish_answer()
        assert goes_on == (was is WireState.SENDING)
        if not goes_on:
            self.say_goodbye()
        else:
            assert answered.keep_alive

    @precondition(lambda self: not self.http1.over)
    @rule()
    def say_goodbye(self) -> None:
        lingers = self.http1.say_goodbye()
        self.ended = True
        assert lingers == (self.http1.server is WireState.DRAINING)
        assert lingers == (self.http1.client in STILL_SENDING)

    @rule()
    def leave(self) -> None:
        self.http1.close()
        self.http1.close()
        self.ended = True
        assert self.http1.client is self.http1.server is WireState.CLOSED

    @invariant()
    def the_sides_are_where_they_can_be(self) -> None:
        assert self.http1.client in CLIENT and self.http1.server in SERVER

    @invariant()
    def a_body_is_open_exactly_while_its_request_is_not_whole(self) -> None:
        if self.http1.client in (WireState.BODY, WireState.IDLE, WireState.HEAD):
            open_bodies = self.heads - self.whole
            assert open_bodies == (self.http1.client is WireState.BODY)


TestConversation = Conversation.TestCase
