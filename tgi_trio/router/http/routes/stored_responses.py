"""Responses that are kept: shown, listed and forgotten, as by OpenAI."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.answer import ERRORS
from tgi_trio.router.http.dialects.responses.history import (
    decode_items,
    find_response,
    forget_response,
)

_PAGE: Final = 20  # items, where a client does not say how many
_LONGEST_PAGE: Final = 100


async def show_response(call: Call) -> Reply:
    """GET /v1/responses/<id>: the response as it was answered."""
    if _last(call, "stream", "false") == "true":
        raise ValidationError("`stream` is not supported: a stream that has ended is not repeated")
    return Reply(find_response(call, call.path["id"], None).body)


async def delete_response(call: Call) -> Reply:
    """DELETE /v1/responses/<id>: forget it."""
    id = call.path["id"]
    forget_response(call, id)
    return Reply(msgspec.json.encode(replies.ResponseDeleted(id)))


async def cancel_response(call: Call) -> Reply:
    """POST /v1/responses/<id>/cancel: refused, as none runs in the background."""
    find_response(call, call.path["id"], None)
    raise ValidationError(
        "A response can be cancelled that was asked for with `background`, which is not supported: "
        "close the connection instead"
    )


async def list_input_items(call: Call) -> Reply:
    """GET /v1/responses/<id>/input_items: the conversation that it answers, newest first."""
    items = decode_items(find_response(call, call.path["id"], None).turn.input_lists())
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
    found = replies.InputItemList(
        data=[_show(item) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(items) > len(page),
    )
    return Reply(msgspec.json.encode(found))


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
