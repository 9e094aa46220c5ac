"""Conversations that are kept: items that clients and responses add to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec
from msgspec.json import encode
from msgspec.structs import replace

from tgi_trio.errors import ValidationError, name_param
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.callers import explain_missing, read_caller
from tgi_trio.router.http.messages.body_reader import LARGE
from tgi_trio.router.http.messages.error_shapes import ResponsesShape
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.response_store import StoredConversation

_ITEM: Final = msgspec.json.Decoder(schema.InputItem)
_PAGE: Final = 20  # items, where a client does not say how many
_LONGEST_PAGE: Final = 100
_STATUSES: Final = get_args(replies.ItemStatus)
_NUMBER: Final = re.compile("[0-9]{1,9}")  # Python reads no number of thousands of digits
# Of routes without a body: errors name what is wrong in the query.
QUERY_ERRORS: Final = ResponsesShape(
    frozenset({"stream", "starting_after", "limit", "order", "after"})
)


def find_conversation(call: Call, id: str, param: str | None = None) -> StoredConversation:
    """Return one of the caller's conversations; `param`: the field that names it.

    Raises Refused (404).
    """
    found = call.responses.find_conversation(id, read_caller(call))
    if found is None:
        text = f"Conversation with id '{id}' not found: {explain_missing(call)}"
        code = "conversation_not_found"
        raise name_param(Refused(404, text, "not_found", code=code, elsewhere=True), param)
    return found


def read_items(items: Sequence[bytes]) -> list[schema.InputItem]:
    """Return items that conversations keep, each in JSON."""
    return [_ITEM.decode(each) for each in items]


def write_items(
    items: Sequence[schema.InputItem | replies.OutputItem],
) -> list[tuple[str, bytes]]:
    """Return the ids of items, and the items in JSON."""
    return [(str(each.id), encode(each)) for each in items]


def show_conversation(conversation: StoredConversation) -> replies.ConversationReply:
    """Return a conversation as clients get it."""
    return replies.ConversationReply(
        id=conversation.id,
        created_at=conversation.created,
        metadata=msgspec.json.decode(conversation.metadata, type=dict[str, str]),
    )


def show_item(item: schema.InputItem) -> dict[str, Any]:
    """Return an item; a message's text is a list of one part, as SDKs expect it."""
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        item = replace(item, content=[{"type": kind, "text": item.content}])
    found: dict[str, Any] = msgspec.to_builtins(item)
    return found | {"status": item.status if item.status in _STATUSES else "completed"}


def list_items(call: Call, items: Sequence[schema.InputItem]) -> replies.InputItemList:
    """Return the page of items, given in order, that the query asks for: newest first by itself.

    Raises ValidationError.
    """
    items = list(items)
    order = read_query(call, "order", "desc")
    if order not in ("asc", "desc"):
        raise ValidationError(f"`order` must be `asc` or `desc`. Given: {order}")
    if order == "desc":
        items.reverse()
    limit = read_query(call, "limit", str(_PAGE))
    if not (_NUMBER.fullmatch(limit) and 1 <= int(limit) <= _LONGEST_PAGE):
        raise ValidationError(f"`limit` must be >= 1 and <= {_LONGEST_PAGE}. Given: {limit}")
    after = read_query(call, "after", "")
    if after:
        ids = [item.id for item in items]
        if after not in ids:
            raise ValidationError(f"`after` must be the id of one of the items. Given: {after}")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return show_page(page, has_more=len(items) > len(page))


async def write_page(call: Call, items: Sequence[schema.InputItem], size: int) -> bytes:
    """Return that page, JSON; `size`: bytes of the items, as many are written in a thread.

    Raises ValidationError.
    """
    return await call.compute(lambda: encode(list_items(call, items)), long=size >= LARGE)


def show_page(page: Sequence[schema.InputItem], *, has_more: bool = False) -> replies.InputItemList:
    """Return items as a list."""
    return replies.InputItemList(
        data=[show_item(item) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=has_more,
    )


def read_query(call: Call, name: str, default: str) -> str:
    """Return the last value that the query has for a parameter."""
    return call.query.get(name, [default])[-1]
