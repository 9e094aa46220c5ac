"""OpenAI's Conversations: items that are kept, to which responses add what is said."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from msgspec.json import encode

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.callers import read_caller
from tgi_trio.router.http.dialects.responses.conversations import (
    QUERY_ERRORS,
    find_conversation,
    read_items,
    show_conversation,
    show_item,
    show_page,
    write_items,
    write_page,
)
from tgi_trio.router.http.dialects.responses.history import (
    name_item,
    read_conversation,
    resolve_items,
)
from tgi_trio.router.http.messages.body_reader import LARGE, BodyReader
from tgi_trio.router.http.messages.error_shapes import ResponsesShape
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.response_store import StoredConversation, measure_items

_CREATE: Final = BodyReader(schema.ConversationRequest)
_UPDATE: Final = BodyReader(schema.ConversationUpdate)
_ITEMS: Final = BodyReader(schema.ConversationItems)


async def create_conversation(call: Call) -> Reply:
    """POST /v1/conversations: keep a new one, with or without items."""
    body: schema.ConversationRequest = await call.compute(
        partial(_CREATE.read, call.headers, call.body or b"{}")
    )
    store = call.responses
    if not store.most:
        raise ValidationError(
            "no conversation can be kept here (--response-store-bytes 0): send all of it as `input`"
        )
    _, items = await _write_items(call, body.items or [])
    id = f"conv_{call.ids.randbytes(24).hex()}"
    conversation = StoredConversation(id, read_caller(call), call.now())
    _refuse_too_many(call, conversation, items)
    store.keep_conversation(conversation)
    store.describe_conversation(conversation, encode(body.metadata or {}))
    store.add_items(conversation, items)
    return _show(conversation)


async def show(call: Call) -> Reply:
    """GET /v1/conversations/<id>."""
    return _show(find_conversation(call, call.path["id"]))


async def update_conversation(call: Call) -> Reply:
    """POST /v1/conversations/<id>: replace its metadata."""
    body: schema.ConversationUpdate = await call.read(_UPDATE)
    conversation = find_conversation(call, call.path["id"])
    call.responses.describe_conversation(conversation, encode(body.metadata or {}))
    return _show(conversation)


async def delete_conversation(call: Call) -> Reply:
    """DELETE /v1/conversations/<id>: forget it."""
    conversation = find_conversation(call, call.path["id"])
    call.responses.forget_conversation(conversation)
    return Reply(encode(replies.ConversationDeleted(conversation.id)))


async def list_conversation(call: Call) -> Reply:
    """GET /v1/conversations/<id>/items, newest first."""
    conversation = find_conversation(call, call.path["id"])
    size, items = conversation.size, await read_conversation(call, conversation)
    return Reply(await write_page(call, items, size))


async def add_items(call: Call) -> Reply:
    """POST /v1/conversations/<id>/items: add some at the end."""
    body: schema.ConversationItems = await call.read(_ITEMS)
    find_conversation(call, call.path["id"])
    items, written = await _write_items(call, body.items)
    conversation = find_conversation(call, call.path["id"])  # it may have been forgotten meanwhile
    _refuse_too_many(call, conversation, written)
    call.responses.add_items(conversation, written)
    size = sum(map(len, written.values()))
    return Reply(await call.compute(lambda: encode(show_page(items)), long=size >= LARGE))


async def show_one_item(call: Call) -> Reply:
    """GET /v1/conversations/<id>/items/<item>."""
    conversation, id = _find_item(call)
    (found,) = read_items([conversation.items[id]])
    return Reply(encode(show_item(found)))


async def delete_item(call: Call) -> Reply:
    """DELETE /v1/conversations/<id>/items/<item>: remove it; the conversation is shown."""
    conversation, id = _find_item(call)
    call.responses.remove_item(conversation, id)
    return _show(conversation)


def _refuse_too_many(
    call: Call, conversation: StoredConversation, items: Mapping[str, bytes]
) -> None:
    """Raise ValidationError for items that no bound would let the conversation keep."""
    size = conversation.size + measure_items(conversation, items)
    if size > call.responses.most:
        raise ValidationError(
            f"`items` make the conversation {size} bytes large, of {call.responses.most} that may "
            "be kept of all (--response-store-bytes)"
        )


async def _write_items(
    call: Call, given: list[schema.InputItem]
) -> tuple[list[schema.InputItem], dict[str, bytes]]:
    """Return items as they are kept, and in JSON by id; with images, they are written in a thread.

    References are replaced. Raises Refused (404).
    """
    found = await resolve_items(call, given, "items")

    def write() -> tuple[list[schema.InputItem], dict[str, bytes]]:
        items = [name_item(call, item) for item in found]
        return items, dict(write_items(items))

    return await call.compute(write, long=bool(call.cut.images))


def _find_item(call: Call) -> tuple[StoredConversation, str]:
    conversation, id = find_conversation(call, call.path["id"]), call.path["item"]
    if id not in conversation.items:
        text = f"Item with id '{id}' not found in this conversation"
        raise Refused(404, text, "not_found", code="item_not_found")
    return conversation, id


def _show(conversation: StoredConversation) -> Reply:
    return Reply(encode(show_conversation(conversation)))


_SHAPE: Final = ResponsesShape(frozenset({"items", "metadata"}), {})
_ALL: Final = "/v1/conversations"
_ONE: Final = f"{_ALL}/<id>"
ROUTES = (
    Route("POST", _ALL, create_conversation, dialect=_SHAPE, images=True),
    Route("GET", _ONE, show, dialect=QUERY_ERRORS),
    Route("POST", _ONE, update_conversation, dialect=_SHAPE),
    Route("DELETE", _ONE, delete_conversation, dialect=QUERY_ERRORS),
    Route("GET", f"{_ONE}/items", list_conversation, dialect=QUERY_ERRORS),
    Route("POST", f"{_ONE}/items", add_items, dialect=_SHAPE, images=True),
    Route("GET", f"{_ONE}/items/<item>", show_one_item, dialect=QUERY_ERRORS),
    Route("DELETE", f"{_ONE}/items/<item>", delete_item, dialect=QUERY_ERRORS),
)
