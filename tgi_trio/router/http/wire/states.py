"""The states of an HTTP/1.1 connection as one literal table; an event that is not in it raises.

Client and server each have a state. The two are separate because a client may send its next request
before it has the last answer (pipelining). `http1.py` is the only file with transitions.
`docs/architecture.md` gets its table and its diagram from here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class WireState(enum.Enum):
    """The state of one side of a connection."""

    # the client's side
    FRESH = "fresh"  # the bytes so far may become HTTP/2's preface
    IDLE = "idle"  # between two requests
    HEAD = "head"  # part of a request's head has arrived
    BODY = "body"  # a head is complete, but not its body
    DEAF = "deaf"  # the last request is complete; anything after it is ignored
    BROKEN = "broken"  # the bytes are not valid HTTP, and more may follow

    # the server's side
    QUIET = "quiet"  # no request has its turn
    ANSWERING = "answering"  # a request is being answered; its answer has no head yet
    SENDING = "sending"  # an answer is being sent; the connection can serve another after it
    SENDING_LAST = "sending last"  # an answer is being sent; the connection ends after it
    DRAINING = "draining"  # our side is closed; what still arrives is read and dropped

    # both
    CLOSED = "closed"  # the connection is over, or HTTP/2 has taken it

    # Enum's own __hash__ is Python code; identity suffices for table lookups.
    __hash__ = object.__hash__


class WireEvent(enum.Enum):
    """What can happen on a connection."""

    # by the client
    RECOGNISE = "recognise"  # the bytes so far cannot become HTTP/2's preface
    SWITCH = "switch"  # the bytes so far are HTTP/2's preface
    BEGIN = "begin"  # the first byte of a head
    REREAD = "reread"  # a head that asks for an upgrade is parsed again without that
    ASK = "ask"  # a head is complete: a request
    END = "end"  # a request is complete, and another may follow
    END_LAST = "end last"  # a request is complete, and none will follow
    BREAK = "break"  # the bytes are not valid HTTP

    # by us
    TURN = "turn"  # the application gets a request
    START = "start"  # the head of an answer is written
    START_LAST = "start last"  # the same, for an answer after which the connection ends
    FINISH = "finish"  # the answer has been sent
    LINGER = "linger"  # our side closes while the client may still be sending

    # by either
    CLOSE = "close"  # the client has left, or the connection was closed here

    __hash__ = object.__hash__


TRANSITIONS: Mapping[tuple[WireState, WireEvent], WireState] = {
    (WireState.FRESH, WireEvent.RECOGNISE): WireState.IDLE,
    (WireState.FRESH, WireEvent.SWITCH): WireState.CLOSED,
    (WireState.FRESH, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.IDLE, WireEvent.BEGIN): WireState.HEAD,
    (WireState.IDLE, WireEvent.BREAK): WireState.BROKEN,
    (WireState.IDLE, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.HEAD, WireEvent.REREAD): WireState.IDLE,
    (WireState.HEAD, WireEvent.ASK): WireState.BODY,
    (WireState.HEAD, WireEvent.BREAK): WireState.BROKEN,
    (WireState.HEAD, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.BODY, WireEvent.END): WireState.IDLE,
    (WireState.BODY, WireEvent.END_LAST): WireState.DEAF,
    (WireState.BODY, WireEvent.BREAK): WireState.BROKEN,
    (WireState.BODY, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.DEAF, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.BROKEN, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.QUIET, WireEvent.TURN): WireState.ANSWERING,
    (WireState.QUIET, WireEvent.LINGER): WireState.DRAINING,
    (WireState.QUIET, WireEvent.SWITCH): WireState.CLOSED,
    (WireState.QUIET, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.ANSWERING, WireEvent.START): WireState.SENDING,
    (WireState.ANSWERING, WireEvent.START_LAST): WireState.SENDING_LAST,
    (WireState.ANSWERING, WireEvent.LINGER): WireState.DRAINING,
    (WireState.ANSWERING, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.SENDING, WireEvent.FINISH): WireState.QUIET,
    (WireState.SENDING, WireEvent.LINGER): WireState.DRAINING,
    (WireState.SENDING, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.SENDING_LAST, WireEvent.LINGER): WireState.DRAINING,
    (WireState.SENDING_LAST, WireEvent.CLOSE): WireState.CLOSED,
    (WireState.DRAINING, WireEvent.CLOSE): WireState.CLOSED,
}

#: The initial states.
CLIENT_BEGINS, SERVER_BEGINS = WireState.FRESH, WireState.QUIET

#: States of the client in which what it sends is no longer parsed as HTTP.
NOT_READ = frozenset({WireState.DEAF, WireState.BROKEN, WireState.CLOSED})

#: States of the client in which it may still be sending, so that closing lingers.
STILL_SENDING = frozenset({WireState.HEAD, WireState.BODY, WireState.BROKEN})


class IllegalWireEvent(Exception):
    """A bug of ours: an event in a state that has no row for it."""

    def __init__(self, state: WireState, event: WireEvent) -> None:
        super().__init__(f"a connection that is {state.name} cannot {event.name}")
        self.state = state
        self.event = event


def next_state(state: WireState, event: WireEvent) -> WireState:
    """Return the state after `event`. Raises IllegalWireEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalWireEvent(state, event) from None
