"""Responses that are kept: shown, listed and forgotten, as by OpenAI."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.answer_headers import event_stream
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.answer import ERRORS
from tgi_trio.router.http.dialects.responses.history import (
    decode_items,
    find_response,
    forget_response,
    read_caller,
)
from tgi_trio.router.http.event_log import EventLog, EventLogBody

_PAGE: Final = 20  # items, where a client does not say how many
_LONGEST_PAGE: Final = 100
_DIGITS: Final = 10
_NO_IDS: Final = b":i 0:\n"  # a front passes on what such a line precedes, and resumes none of it


async def show_response(call: Call) -> Reply:
    """GET /v1/responses/<id>: the response as it was answered, or as it is now; or its events."""
    id = call.path["id"]
    running = call.responses.find_running(id, read_caller(call))
    if _last(call, "stream", "false") != "true":
        return Reply(find_response(call, id, None).body if running is None else running.show())
    log = find_response(call, id, None).log if running is None else running.log
    if log is None:
        raise ValidationError(
            "`stream` needs a response that was asked for with `background` and `stream`: no other "
            "events are kept"
        )
    after = _last(call, "starting_after", "")
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
    items = decode_items(found.turn.input_lists())
    order = _last(call, "order", "desc")
    if order not in ("asc", "desc"):
        raise ValidationError(f"`order` must be `asc` or `desc`. Given: {order}")
    if order == "desc":
        items.reverse()
    limit = _last(call, "limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _LONGEST_PAGE):
        raise ValidationError(f"`limit` must be >= 1 and <= {_LONGEST_PAGE}. Given: {limit}")
    after = _last(call, "after", "")
    if after:
        ids = [item.id for item in items]
        if after not in ids:
            raise ValidationError(f"`after` must be the id of one of the items. Given: {after}")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    shown = replies.InputItemList(
        data=[_show(item) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(items) > len(page),
    )
    return Reply(msgspec.json.encode(shown))


def _last(call: Call, name: str, default: str) -> str:
    """Return the last value that the query has for a parameter."""
    return call.query.get(name, [default])[-1]


def _show(item: schema.InputItem) -> dict[str, Any]:
    """Return an item; a message's text is a list of one part, as SDKs expect it."""
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        item = replace(item, content=[{"type": kind, "text": item.content}])
    found: dict[str, Any] = msgspec.to_builtins(item)
    return found | {"status": "completed"}


_ONE: Final = "/v1/responses/<id>"
ROUTES = (
    Route("GET", _ONE, show_response, dialect=ERRORS),
    Route("DELETE", _ONE, delete_response, dialect=ERRORS),
    Route("POST", f"{_ONE}/cancel", cancel_response, dialect=ERRORS),
    Route("GET", f"{_ONE}/input_items", list_input_items, dialect=ERRORS),
)
