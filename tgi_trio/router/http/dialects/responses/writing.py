"""Writes a response and its items in each state: in progress, complete, incomplete."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.json import encode

from tgi_trio.router.http.dialects.blocks import Block, BlockKind
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.client_tools import CLIENT_TOOLS
from tgi_trio.router.http.dialects.responses.items import CALL_PREFIX
from tgi_trio.router.http.dialects.responses.text_logprobs import TextLogprobs
from tgi_trio.router.http.dialects.responses.tools import Toolbox, Way
from tgi_trio.router.http.dialects.thought_codec import encode_thought
from tgi_trio.router.http.messages.list_pieces import encode_list
from tgi_trio.router.text.tools.custom import read_input

CARRIED: Final = "reasoning.encrypted_content"  # in `include`


def copy_settings(
    request: schema.ResponsesRequest, model: str, store: bool
) -> replies.ResponseSettings:
    """Return the fields of a request that its response repeats; `store`: whether it is kept."""
    thinking, text, within = request.reasoning, request.text, name_conversation(request)
    form = None if text is None or text.format is None else text.format
    shown = {"type": "text"} if form is None else msgspec.to_builtins(form)
    return replies.ResponseSettings(
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={
            "effort": None if thinking is None else thinking.effort,
            "summary": None if thinking is None else thinking.summary,
        },
        temperature=1.0 if request.temperature is None else request.temperature,
        text={
            "format": {name: value for name, value in shown.items() if value is not None},
            "verbosity": None if text is None else text.verbosity,
        },
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=1.0 if request.top_p is None else request.top_p,
        top_logprobs=request.top_logprobs or 0,
        metadata=request.metadata or {},
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        background=bool(request.background),
        conversation=None if within is None else replies.ConversationName(within),
        previous_response_id=request.previous_response_id,
        store=store,
    )


def name_conversation(request: schema.ResponsesRequest) -> str | None:
    """Return the id of the conversation that a request belongs to."""
    given = request.conversation
    return given.id if isinstance(given, schema.ConversationParam) else given


class ResponseWriter:
    """Writes one response in each of its states."""

    def __init__(
        self, settings: replies.ResponseSettings, created: int, source: random.Random
    ) -> None:
        """`created`: Unix seconds; `source`: the random source of the id."""
        self.id = f"resp_{source.randbytes(24).hex()}"
        self._created = created
        # Once: agents send 100 kB of tools, and each state repeats it.
        fields = {**msgspec.structs.asdict(settings), "tools": encode_list(settings.tools)}
        self._settings = encode(fields)[1:]

    def json(
        self,
        status: replies.ResponseStatus,
        output: Sequence[replies.OutputItem] = (),
        usage: replies.ResponseUsage | None = None,
        *,
        error: replies.ResponseError | None = None,
        completed: int | None = None,
    ) -> bytes:
        """Return the response; `completed`: when it ended, in Unix seconds."""
        cut = replies.IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": usage,
            "completed_at": completed,
        }
        return encode(fields)[:-1] + b"," + self._settings


@dataclass(frozen=True, slots=True)
class ItemWriter:
    """Converts blocks to items; each keeps its id."""

    box: Toolbox
    carried: bool  # clients keep thoughts for us
    summarised: bool  # thoughts come as summaries of themselves: all that some clients show
    source: random.Random  # random source of the items' ids
    logprobs: TextLogprobs | None = None  # None if no log-probabilities are asked for
    ids: list[str] = field(default_factory=list)

    def item(self, block: Block, status: replies.ItemStatus) -> replies.OutputItem:
        """Return a block as an item, with its contents so far."""
        id, call_id, text = self.id(block), CALL_PREFIX + block.call_id, block.text
        in_progress = status == "in_progress"
        if block.kind is BlockKind.THOUGHT:
            if in_progress:
                return replies.ReasoningItem(id, status, [])
            kept = encode_thought(text) if self.carried else UNSET
            if self.summarised:
                summary = [replies.SummaryTextPart(text)]
                return replies.ReasoningItem(id, status, [], summary, encrypted_content=kept)
            content = [replies.ReasoningTextPart(text)]
            return replies.ReasoningItem(id, status, content, encrypted_content=kept)
        if block.kind is BlockKind.TEXT:
            parts = [] if in_progress else [self.part(block)]
            return replies.MessageItem(id, status, parts)
        tool = self.box.find(block.name)
        match tool.way:
            case Way.CUSTOM:
                given, space = read_input(text), tool.namespace or UNSET
                return replies.CustomToolCallItem(id, status, call_id, tool.name, given, space)
            case Way.CLIENT:
                return CLIENT_TOOLS[tool.name].write(id, status, call_id, _arguments(text))
            case Way.FUNCTION:
                space = tool.namespace or UNSET
                return replies.FunctionCallItem(id, status, call_id, tool.name, text, space)

    def part(self, block: Block) -> replies.OutputTextPart:
        """Return a complete text."""
        if self.logprobs is None:
            return replies.OutputTextPart(block.text)
        return replies.OutputTextPart(block.text, logprobs=self.logprobs.of(block))

    def id(self, block: Block) -> str:
        """Return the id of a block's item."""
        while len(self.ids) <= block.index:
            self.ids.append(f"{_PREFIXES[block.kind]}_{self.source.randbytes(24).hex()}")
        return self.ids[block.index]


_PREFIXES: Final = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


def _arguments(text: str) -> dict[str, Any]:
    with suppress(msgspec.DecodeError, RecursionError):
        found = msgspec.json.decode(text or "{}")
        if isinstance(found, dict):
            return found
    return {}
