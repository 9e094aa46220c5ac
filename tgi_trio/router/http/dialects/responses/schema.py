"""The body of /v1/responses.

Only fields that are served, repeated in the answer or refused are declared; others are ignored, or
refused by `RESPONSES`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from tgi_trio.router.http.messages.schema import U32, AudioData
from tgi_trio.router.http.messages.shared_fields import I32, Effort, Scheduling, Seed
from tgi_trio.router.http.messages.unserved import RESPONSES

Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]


class InputPart(Struct):
    """A part of a message or of a result; `type` decides which fields it has."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None  # of an image; a data URL, or one to fetch
    input_audio: AudioData | None = None


class ReasoningText(Struct, omit_defaults=True):
    """A piece of a thought or of its summary."""

    text: str = ""


Parts = str | list[InputPart]


class InputItem(Struct, omit_defaults=True):
    """An item of a conversation; `type` decides which fields it has, and messages may lack it."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Any = None
    status: Any = None  # shown again, where it is one of `ItemStatus`
    # Of a call, and of its result:
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None  # text of a function's call; items that are passed over have others
    input: str | None = None
    action: Any = None
    operation: Any = None
    output: Any = None
    # Of a thought:
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    # Of what changes for the answers behind it; see `updates.py`.
    tools: Any = None
    reasoning: Any = None
    text: Any = None


class TextFormat(Struct):
    """The form of the answer."""

    type: str
    name: str | None = None
    schema: Any = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct):
    """How to think before the answer."""

    effort: Effort | None = None
    summary: str | None = None


class PromptCacheOptions(Struct):
    """How prompts are cached; all but one of its fields have no effect."""

    prewarm: bool | None = None  # refused


class ImageOptions(Struct):
    """What is done with images; all but one of its fields have no effect."""

    context_compression: str | None = None  # refused where it must be done


class ConversationParam(Struct):
    """A conversation by its id."""

    id: str


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ConversationRequest(Struct):
    """Body of /v1/conversations."""

    items: list[InputItem] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct):
    """Body that replaces what is noted of a conversation."""

    metadata: Metadata | None


class ConversationItems(Struct):
    """Body that adds items to a conversation."""

    items: list[InputItem]


class CompactRequest(Scheduling, kw_only=True):
    """Body of /v1/responses/compact."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    # What shapes the prompt of the conversation, and so what is cached of it.
    tools: list[dict[str, Any]] | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(Scheduling, kw_only=True):
    """Body of /v1/responses."""

    unserved: ClassVar = RESPONSES

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: U32 | None = None
    stream: bool | None = None
    store: bool | None = None  # whether later requests may go on from it; absent: they may
    previous_response_id: str | None = None
    conversation: str | ConversationParam | None = None  # one that is kept: its items come first
    # Repeated in the answer.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None  # whether it is computed though nobody waits
    # Refused if they ask for something.
    prompt: Any = None
    moderation: Any = None
    prompt_cache_options: PromptCacheOptions | None = None
    image: ImageOptions | None = None
    # Not in OpenAI's API.
    stop: str | list[str] | None = None
    seed: Seed | None = None
    top_k: I32 | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: U32 | None = None  # of OpenAI's own tools, which are not served
