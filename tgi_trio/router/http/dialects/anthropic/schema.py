"""Bodies of /v1/messages and /v1/messages/count_tokens.

Only served fields are declared. Everything else is ignored: agents send fields and blocks for
features that this server does not have, and rely on their being ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi_trio.router.http.messages.schema import U32
from tgi_trio.router.http.messages.shared_fields import I32, Effort, Salt, Seed

MOST_STOPS = 64


class ContentBlock(Struct):
    """A part of a message; `type` decides which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    # Of a call, and of its result:
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None  # text, or blocks
    is_error: bool | None = None
    # Of a document, and of a result of the client's own search:
    source: Any = None
    title: str | None = None
    context: str | None = None
    signature: str | None = None  # of a thought; it has the thought where that was not shown
    # Of what changes tools in the middle of a conversation, and of a summary with such changes:
    tool: Any = None
    tool_changes: list[Any] | None = None


Content = str | list[ContentBlock]


class OutputFormat(Struct):
    """The form of the answer."""

    type: str
    schema: Any = None


class OutputConfig(Struct):
    """Options of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class InputMessage(Struct):
    """One turn of a conversation."""

    role: str
    content: Content | None = None  # absent of messages that only change settings
    output_config: OutputConfig | None = None  # of the system's; its `format` has no effect
    clear_at: str | None = None  # of the system's: until when it is shown


class ToolDefinition(Struct):
    """A tool that the model may call; of other types than `custom` those that clients run."""

    name: str | None = None  # required unless the tool is ignored
    description: str | None = None
    input_schema: Any = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(Struct):
    """Whether the model must call, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: U32 | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of /v1/messages/count_tokens: the fields of /v1/messages that affect the prompt."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: Content | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    thread: Any = None  # refused: a conversation that a server holds
    # Not in Anthropic's API.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: U32  # 0: the prompt is computed, so that its prefix is cached, and nothing is said
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    compaction: Any = None  # refused: a summary instead of an answer
    # Not in Anthropic's API.
    seed: Seed | None = None
    timeout: float | None = None  # seconds from the request's arrival
    priority: I32 | None = None  # lower is sooner
    cache_salt: Salt | None = None
