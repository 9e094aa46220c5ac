"""What a request of /v1/responses goes on from, and what later ones can go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_history
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.json import encode
from msgspec.structs import replace

from tgi_trio.errors import name_param
from tgi_trio.router.http.call import SYSTEM_RANDOM, Call
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.callers import explain_missing, read_caller
from tgi_trio.router.http.dialects.responses.conversations import (
    find_conversation,
    read_items,
    write_items,
)
from tgi_trio.router.http.dialects.responses.items import is_reference
from tgi_trio.router.http.dialects.responses.writing import name_conversation
from tgi_trio.router.http.event_log import EventLog
from tgi_trio.router.http.messages.body_reader import LARGE, invalid_value
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.response_store import (
    NO_ITEMS,
    ItemIds,
    StoredConversation,
    StoredResponse,
    StoredTurn,
)

_ITEMS: Final = msgspec.json.Decoder(list[schema.InputItem])
# Of ids; the others are calls and results.
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "compaction": "cmp"}


@dataclass(frozen=True, slots=True)
class WrittenItems:
    """Items as they are kept."""

    items: tuple[tuple[str, bytes], ...] = ()  # the id of each, and the JSON
    ids: ItemIds = NO_ITEMS
    listed: bytes = b"[]"  # all of them, in JSON

    @classmethod
    def of(cls, items: Sequence[schema.InputItem]) -> WrittenItems:
        """Write items down; takes microseconds each."""
        written = tuple(write_items(items))
        ids = ItemIds.of(id for id, _ in written)
        return cls(written, ids, b"[%b]" % b",".join([item for _, item in written]))


NOT_WRITTEN: Final = WrittenItems()


@dataclass(frozen=True, slots=True)
class History:
    """The items of a conversation up to the answer."""

    before: StoredTurn | None  # that of the previous response, or of the conversation
    kept: list[schema.InputItem]  # its items and those before them
    given: list[schema.InputItem]  # the request's own, and those that it refers to
    conversation: StoredConversation | None = None  # that it belongs to
    written: WrittenItems = NOT_WRITTEN  # its own items, see `write_given`


async def read_history(call: Call, request: schema.ResponsesRequest) -> History:
    """Return the items that a request stands for. Raises BodyRejected and Refused (404)."""
    before, conversation, kept = None, None, list[schema.InputItem]()
    if (id := request.previous_response_id) is not None:
        before = find_response(call, id, "previous_response_id").turn
        kept = await read_turn(call, before.lists())
    elif (id := name_conversation(request)) is not None:
        conversation = find_conversation(call, id, "conversation")
        kept = await read_conversation(call, conversation)
        before = None if conversation.turn is None else conversation.turn()
        if before is None and kept:
            before = StoredTurn(None, encode(kept), b"[]")
    if isinstance(request.input, str):
        given = [schema.InputItem("message", role="user", content=request.input)]
    else:
        given = await resolve_items(call, request.input, "input")
    return History(before, kept, given, conversation)


async def resolve_items(
    call: Call, items: Sequence[schema.InputItem], field: str
) -> list[schema.InputItem]:
    """Return items, each reference replaced by what it refers to.

    Raises BodyRejected for a reference without an id, Refused (404) for what is not kept.
    """
    resolved, places = await call.compute(partial(_find_references, items))
    caller = read_caller(call)
    # By responses, each of which is decoded once: it may hold all of the conversation, with images.
    found: dict[str, dict[str | None, schema.InputItem]] = {}
    for i in places:
        if (id := items[i].id) is None:
            raise invalid_value(f"{field}[{i}]", "missing field `id`")
        response = call.responses.find_by_item(id, caller)
        if response is None:
            text = f"Item with id '{id}' not found: {explain_missing(call)}; send the item itself"
            refused = Refused(404, text, "not_found", code="item_not_found", elsewhere=True)
            raise name_param(refused, f"{field}[{i}]")
        if response.id not in found:
            kept = decode_items([response.turn.given, response.turn.answered])
            found[response.id] = {each.id: each for each in kept}
        resolved[i] = found[response.id][id]
    return resolved


def _find_references(items: Sequence[schema.InputItem]) -> tuple[list[schema.InputItem], list[int]]:
    """Return a copy of items, and the places of references among them."""
    return list(items), [i for i, item in enumerate(items) if is_reference(item)]


async def read_turn(call: Call, lists: Sequence[bytes]) -> list[schema.InputItem]:
    """Return the items of lists in JSON, which a turn has; of long ones in a thread."""
    return await call.make(partial(decode_items, lists), long=sum(map(len, lists)) >= LARGE)


async def read_conversation(call: Call, conversation: StoredConversation) -> list[schema.InputItem]:
    """Return the items of a conversation as it is now; of a long one in a thread."""
    items = list(conversation.items.values())
    return await call.make(partial(read_items, items), long=conversation.size >= LARGE)


def decode_items(lists: Sequence[bytes]) -> list[schema.InputItem]:
    """Return the items of lists in JSON, which a turn has."""
    return [item for each in lists for item in _ITEMS.decode(each)]


def find_response(call: Call, id: str, param: str | None) -> StoredResponse:
    """Return one of the caller's responses; `param`: the field that names it.

    Raises Refused (404).
    """
    found = call.responses.find(id, read_caller(call))
    if found is not None:
        return found
    if call.responses.find_running(id, read_caller(call)) is not None:
        text = f"Response with id '{id}' has not ended yet: wait until it has, or cancel it"
        raise name_param(Refused(400, text, "validation"), param)
    text, code = f"Response with id '{id}' not found: {explain_missing(call)}", "response_not_found"
    if param:
        code = "previous_response_not_found"
        text = (
            f"Previous response with id '{id}' not found: {explain_missing(call)}; send the whole "
            "conversation as `input`"
        )
    raise name_param(Refused(404, text, code, code=code, elsewhere=True), param)


def forget_response(call: Call, id: str) -> None:
    """Forget one of the caller's responses; one that runs is cancelled. Raises Refused (404)."""
    running = call.responses.find_running(id, read_caller(call))
    if running is not None:
        running.drop()
        return
    find_response(call, id, None)
    call.responses.forget(id, read_caller(call))


def keeps(call: Call, request: schema.ResponsesRequest) -> bool:
    """Whether the response to a request is kept."""
    return request.store is not False and call.responses.most > 0


def keep_response(
    call: Call,
    history: History,
    id: str,
    body: bytes,
    output: Sequence[replies.OutputItem],
    *,
    background: bool = False,
    log: EventLog | None = None,
    stored: bool = True,
    said: bool = True,
) -> None:
    """Keep a response that has ended: what was asked, and what was answered.

    `history`: written, see `write_given`; `background`, `log`: as `StoredResponse` has them.
    `stored`: whether it is kept itself; `said`: whether its conversation is told, if it has one.
    """
    conversation = history.conversation
    if not stored and conversation is None:
        return
    answered = [_without_logprobs(item) for item in output]
    written = history.written
    item_ids = written.ids.answer(each.id for each in answered if each.id)
    turn = StoredTurn(history.before, written.listed, encode(answered))
    if stored:
        caller = read_caller(call)
        call.responses.keep(StoredResponse(id, caller, body, turn, item_ids, background, log))
    if conversation is not None and said:
        added = dict([*written.items, *write_items(answered)])
        # What others have added or removed meanwhile is not in the turns.
        unchanged = list(conversation.items) == [each.id for each in history.kept]
        alone = stored and unchanged and conversation.items.keys().isdisjoint(added)
        call.responses.add_items(conversation, added, turn if alone else None)


async def write_given(call: Call, history: History) -> History:
    """Return a history with its own items as they are kept.

    They are written before the answer, beside the loop where they hold images: nothing can be done
    beside it at the answer's end, by which they have to be there.
    """

    def write() -> History:
        items = [name_item(call, item) for item in history.given]
        return replace_history(history, written=WrittenItems.of(items))

    return await call.make(write, long=bool(call.cut.images))


def _without_logprobs(item: replies.OutputItem) -> replies.OutputItem:
    """Return an item of an answer as it is part of the conversation."""
    if not isinstance(item, replies.MessageItem):
        return item
    return replace(item, content=[replace(part, logprobs=[]) for part in item.content])


def name_item(call: Call, item: schema.InputItem) -> schema.InputItem:
    """Return an item with a type, an id, and images that are its own."""
    kind = item.type or "message"
    prefix = _PREFIXES.get(kind, "fc")
    # Not of `call.ids`: whether one is drawn depends on what is kept, which replicas may do or not.
    id = item.id or f"{prefix}_{SYSTEM_RANDOM.randbytes(24).hex()}"
    content = item.content
    if call.cut.images and isinstance(content, list):
        content = [_restore_media(call, part) for part in content]
    return replace(item, type=kind, id=id, content=content)


def _restore_media(call: Call, part: Any) -> Any:
    """Return a part of a message with the image or sound that was cut out of the body."""
    if not isinstance(part, Mapping):
        return part
    found = dict(part)
    if isinstance(url := found.get("image_url"), str):
        found["image_url"] = call.cut.write_url(url)
    audio = found.get("input_audio")
    if isinstance(audio, Mapping) and isinstance(audio.get("data"), str):
        found["input_audio"] = {**audio, "data": call.cut.write_data(audio["data"])}
    return found
