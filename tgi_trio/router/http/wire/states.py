"""HTTP/1.1 on one connection as one literal table; whatever is not in it raises.

Two sides move through it, each in a state of its own: what the client says and what we say. They
are apart because a client may send its next request before it has the answer to the last
(pipelining). `http1.py` is the only file in which anything happens to either;
`docs/architecture.md` draws its table and its diagram from here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class WireState(enum.Enum):
    """Where one side of a connection stands."""

    # what the client says
    FRESH = "fresh"  # what has come may yet become HTTP/2's preface
    IDLE = "idle"  # between two requests
    HEAD = "head"  # a part of a request's head has come
    BODY = "body"  # a head is whole, what belongs to it is not
    DEAF = "deaf"  # the last request has come; what follows is not for us
    BROKEN = "broken"  # what came is no HTTP, and more of it may follow

    # what we say
    QUIET = "quiet"  # nothing is asked of us
    ANSWERING = "answering"  # a request has its turn; its answer has no head yet
    SENDING = "sending"  # an answer is under way, after which the connection is good for another
    SENDING_LAST = "sending last"  # an answer is under way, after which the connection ends
    DRAINING = "draining"  # we have said goodbye; what still comes is read and dropped

    # both
    CLOSED = "closed"  # the connection is over, or HTTP/2 has taken it

    # enum's own __hash__ is Python code; identity is what a table lookup needs
    __hash__ = object.__hash__


class WireEvent(enum.Enum):
    """What can happen on a connection."""

    # by the client
    RECOGNISE = "recognise"  # what came cannot become HTTP/2's preface
    SWITCH = "switch"  # what came is HTTP/2's preface
    BEGIN = "begin"  # the first byte of a head
    REREAD = "reread"  # a head that asks for an upgrade is read again without the question
    ASK = "ask"  # a head is whole: a request
    END = "end"  # a request is whole, and another may follow
    END_LAST = "end last"  # a request is whole, and none will follow
    BREAK = "break"  # what came is no HTTP

    # by us
    TURN = "turn"  # the application is given a request
    START = "start"  # the head of an answer is made
    START_LAST = "start last"  # the same, of an answer with which the connection ends
    FINISH = "finish"  # the answer has left
    LINGER = "linger"  # we say goodbye while the client may still be sending

    # by either
    CLOSE = "close"  # the client has left, or we have hung up

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

#: Where each side begins.
CLIENT_BEGINS, SERVER_BEGINS = WireState.FRESH, WireState.QUIET

#: States of the client in which nothing of what it sends is read as HTTP any more.
UNHEARD = frozenset({WireState.DEAF, WireState.BROKEN, WireState.CLOSED})

#: States of the client in which it may be in the middle of sending, so that a goodbye lingers.
STILL_SENDING = frozenset({WireState.BODY, WireState.BROKEN})


class IllegalWireEvent(Exception):
    """A bug of ours: an event came in a state that has no row for it."""

    def __init__(self, state: WireState, event: WireEvent) -> None:
        super().__init__(f"a connection that is {state.name} cannot {event.name}")
        self.state = state
        self.event = event


def next_state(state: WireState, event: WireEvent) -> WireState:
    """Return the state after `event`; raises IllegalWireEvent."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalWireEvent(state, event) from None
