"""Replies of /v1/messages as types: written by `answer.py`, shown in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from tgi_trio.router.http.messages.replies import StreamReceipt

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingContent(Struct, tag="thinking", forbid_unknown_fields=True):
    """A thought of the model."""

    thinking: str
    signature: str


class TextContent(Struct, tag="text", forbid_unknown_fields=True):
    """A text of the model."""

    text: str


class ToolUseContent(Struct, tag="tool_use", forbid_unknown_fields=True):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Content = ThinkingContent | TextContent | ToolUseContent


class MessageTokensDetails(Struct, forbid_unknown_fields=True):
    """Parts of an answer's tokens."""

    thinking_tokens: int  # thoughts and their marks


class MessageUsage(Struct, forbid_unknown_fields=True):
    """Tokens of the prompt, in three parts, and of the answer."""

    input_tokens: int  # without the two below
    output_tokens: int
    cache_creation_input_tokens: int = 0  # always 0: caching has no price of its own
    cache_read_input_tokens: int = 0
    output_tokens_details: MessageTokensDetails | UnsetType = UNSET  # known at the end


class MessageReply(Struct, tag="message", forbid_unknown_fields=True):
    """A whole answer."""

    id: str
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct, forbid_unknown_fields=True):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicErrorDetail(Struct, forbid_unknown_fields=True):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(Struct, tag="error", forbid_unknown_fields=True):
    """Anthropic's error."""

    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET  # not in streams


# ---- events ------------------------------------------------------------------------------------


class ThinkingDelta(Struct, tag="thinking_delta", forbid_unknown_fields=True):
    """More of a thought."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta", forbid_unknown_fields=True):
    """The end of a thought."""

    signature: str


class TextDelta(Struct, tag="text_delta", forbid_unknown_fields=True):
    """More of a text."""

    text: str


class InputJsonDelta(Struct, tag="input_json_delta", forbid_unknown_fields=True):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class MessageEnd(Struct, forbid_unknown_fields=True):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Struct, tag="message_start", forbid_unknown_fields=True):
    """The first event."""

    message: MessageReply


class ContentBlockStart(Struct, tag="content_block_start", forbid_unknown_fields=True):
    """A block begins."""

    index: int
    content_block: Content


class ContentBlockDelta(Struct, tag="content_block_delta", forbid_unknown_fields=True):
    """A piece of a block."""

    index: int
    delta: ThinkingDelta | SignatureDelta | TextDelta | InputJsonDelta


class ContentBlockStop(Struct, tag="content_block_stop", forbid_unknown_fields=True):
    """A block ends."""

    index: int


class MessageDelta(Struct, tag="message_delta", forbid_unknown_fields=True):
    """The answer has ended."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag="message_stop", forbid_unknown_fields=True):
    """The last event."""

    receipt: StreamReceipt | UnsetType = UNSET


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicErrorResponse
)


class AnthropicModel(Struct, forbid_unknown_fields=True):
    """A served model, as /v1/models tells it to Anthropic's clients."""

    id: str
    display_name: str
    max_input_tokens: int  # of a prompt
    max_tokens: int  # of an answer, at most
    type: Literal["model"] = "model"
    created_at: str = "1970-01-01T00:00:00Z"  # as of their models whose date is unknown
    lifecycle: Literal["active"] = "active"


class AnthropicModels(Struct, forbid_unknown_fields=True):
    """Answer of /v1/models to Anthropic's clients: one page with all of them."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False
