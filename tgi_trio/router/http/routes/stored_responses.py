"""Responses that are kept: shown, listed and forgotten, as by OpenAI."""

from __future__ import annotations

from typing import Final

import msgspec

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.answer_headers import event_stream
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.dialects.responses.callers import read_caller
from tgi_trio.router.http.dialects.responses.conversations import (
    QUERY_ERRORS,
    read_query,
    write_page,
)
from tgi_trio.router.http.dialects.responses.history import (
    find_response,
    forget_response,
    read_turn,
)
from tgi_trio.router.http.event_log import EventLog, EventLogBody

_DIGITS: Final = 10
_NO_IDS: Final = b":i 0:\n"  # a front passes on what such a line precedes, and resumes none of it


async def show_response(call: Call) -> Reply:
    """GET /v1/responses/<id>: the response as it was answered, or as it is now; or its events."""
    id = call.path["id"]
    running = call.responses.find_running(id, read_caller(call))
    if read_query(call, "stream", "false") != "true":
        return Reply(find_response(call, id, None).body if running is None else running.show())
    log = find_response(call, id, None).log if running is None else running.log
    if log is None:
        raise ValidationError(
            "`stream` needs a response that was asked for with `background` and `stream`: no other "
            "events are kept"
        )
    after = read_query(call, "starting_after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < _DIGITS):
        raise ValidationError(
            f"`starting_after` must be the `sequence_number` of an event. Given: {after[:_DIGITS]}"
        )
    return event_stream(call, read_log(call, log, int(after) + 1 if after else 0), 0)


def read_log(call: Call, log: EventLog, start: int = 0) -> EventLogBody:
    """Return a body with the events of a response, from a number on."""
    mark = b"" if call.front is None else _NO_IDS
    return EventLogBody(log, start, call.settings.silence, mark)


async def delete_response(call: Call) -> Reply:
    """DELETE /v1/responses/<id>: forget it."""
    id = call.path["id"]
    forget_response(call, id)
    return Reply(msgspec.json.encode(replies.ResponseDeleted(id)))


async def cancel_response(call: Call) -> Reply:
    """POST /v1/responses/<id>/cancel: end one that runs in the background; again, nothing."""
    id = call.path["id"]
    running = call.responses.find_running(id, read_caller(call))
    if running is not None:
        return Reply(running.cancel())
    found = find_response(call, id, None)
    if not found.background:
        raise ValidationError(
            "A response can be cancelled that was asked for with `background`: of any other, close "
            "the connection"
        )
    return Reply(found.body)


async def list_input_items(call: Call) -> Reply:
    """GET /v1/responses/<id>/input_items: the conversation that it answers, newest first."""
    id = call.path["id"]
    found = call.responses.find_running(id, read_caller(call)) or find_response(call, id, None)
    lists = found.turn.input_lists()
    items = await read_turn(call, lists)
    return Reply(await write_page(call, items, sum(map(len, lists))))


_ONE: Final = "/v1/responses/<id>"
ROUTES = (
    Route("GET", _ONE, show_response, dialect=QUERY_ERRORS),
    Route("DELETE", _ONE, delete_response, dialect=QUERY_ERRORS),
    Route("POST", f"{_ONE}/cancel", cancel_response, dialect=QUERY_ERRORS),
    Route("GET", f"{_ONE}/input_items", list_input_items, dialect=QUERY_ERRORS),
)
