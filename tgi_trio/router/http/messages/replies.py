"""Bodies of replies as types, for the OpenAPI document and for tests.

Those of generations are here, others in `service_replies.py`. Replies themselves are written in
`render.py` and `events.py`. `T | UnsetType = UNSET` is a field that may be left out, `T | None` one
that may be null.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["length", "eos_token", "stop_sequence"]
OpenAIFinishReason = Literal["stop", "length", "tool_calls"]
StopReason = str | int | None  # the stop string, expression or token id


class ErrorResponse(Struct, forbid_unknown_fields=True):
    """What went wrong."""

    error: str
    error_type: str


class OpenAIError(Struct, forbid_unknown_fields=True):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None  # path of the field that is wrong
    code: str | None
    http_status_code: int


class OpenAIErrorResponse(Struct, forbid_unknown_fields=True):
    """Error of the OpenAI endpoints; `error_type` is TGI's."""

    error: OpenAIError
    error_type: str


class StreamReceipt(Struct, forbid_unknown_fields=True):
    """What a streamed generation cost; ours, in the last of its events."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    output_tokens: int


class Token(Struct, forbid_unknown_fields=True):
    """A generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct, forbid_unknown_fields=True):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(Struct, forbid_unknown_fields=True):
    """A generation that was not the best."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct, forbid_unknown_fields=True):
    """How a text was generated."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(Struct, forbid_unknown_fields=True):
    """Answer of /generate."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, forbid_unknown_fields=True):
    """How a stream ended."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct, forbid_unknown_fields=True):
    """Event of /generate_stream."""

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: list[Token] | UnsetType = UNSET
    # Only if `inputs` is a list: the query's index, and the token's place in its answer, from 0.
    query_id: int | UnsetType = UNSET
    position: int | UnsetType = UNSET
    receipt: StreamReceipt | UnsetType = UNSET


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """Kinds of tokens of a prompt."""

    cached_tokens: int  # not computed again


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """Kinds of tokens of an answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, forbid_unknown_fields=True):
    """Tokens of a call; the details are left out until the answer ends."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ChatCompletionTopLogprob(Struct, forbid_unknown_fields=True):
    """A token that might have been chosen."""

    token: str
    logprob: float | None
    bytes: list[int] | None  # of its UTF-8; a token may be a part of a character


class ChatCompletionLogprob(Struct, forbid_unknown_fields=True):
    """A chosen token."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[ChatCompletionTopLogprob]


class ChatCompletionLogprobs(Struct, forbid_unknown_fields=True):
    """The tokens of an answer."""

    content: list[ChatCompletionLogprob]


class PromptLogprob(Struct, forbid_unknown_fields=True):
    """A token of the prompt, or one that was likelier, in vLLM's shape."""

    logprob: float | None
    rank: int | None  # 1: the likeliest; null beyond the alternatives that were asked for
    decoded_token: str


# By token id; null for the first token, which has no prediction.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """The called function and its arguments."""

    name: str
    arguments: str  # JSON


class CalledCustomTool(Struct, forbid_unknown_fields=True):
    """The called custom tool and its text."""

    name: str
    input: str


class OutputToolCall(Struct, forbid_unknown_fields=True):
    """A call of a tool; it has the field that `type` names."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class OutputMessage(Struct, forbid_unknown_fields=True):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None  # null if there are calls and no prose, or a thought that was cut off
    tool_calls: list[OutputToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the thought before the answer, if any
    reasoning: str | UnsetType = UNSET  # the same by vLLM's name


class ChatCompletionComplete(Struct, forbid_unknown_fields=True):
    """One answer."""

    index: int
    message: OutputMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: OpenAIFinishReason
    stop_reason: StopReason
    matched_stop: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, forbid_unknown_fields=True):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a call's function."""

    name: str | UnsetType = UNSET  # only in the first piece of a call
    arguments: str  # to be concatenated


class CustomDelta(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a custom tool's call."""

    name: str | UnsetType = UNSET  # only in the first piece of a call
    input: str  # empty until the whole text comes


class ToolCallDelta(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a call, of a function or of a custom tool."""

    index: int  # of the call
    id: str | UnsetType = UNSET  # only in the first piece
    type: Literal["function", "custom"] | UnsetType = UNSET  # the same
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class DeltaMessage(Struct, forbid_unknown_fields=True):
    """A piece of the model's turn."""

    role: Literal["assistant"]
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # part of a thought
    reasoning: str | UnsetType = UNSET  # the same by vLLM's name


class ChatCompletionChoice(Struct, forbid_unknown_fields=True):
    """A piece of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: StopReason
    matched_stop: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, forbid_unknown_fields=True):
    """Event of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of each choice
    receipt: StreamReceipt | UnsetType = UNSET


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    """The tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]  # null: the first token of the prompt
    text_offset: list[int]


class CompletionComplete(Struct, forbid_unknown_fields=True):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: StopReason
    matched_stop: StopReason
    prompt_token_ids: list[int] | UnsetType = UNSET  # in streams: in the first chunk of each choice
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionFinal(Struct, forbid_unknown_fields=True):
    """Answer of /v1/completions, and the last event of each of its streams."""

    object: Literal["text_completion"]
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage
    receipt: StreamReceipt | UnsetType = UNSET


class Chunk(Struct, forbid_unknown_fields=True):
    """Event of /v1/completions."""

    object: Literal["text_completion"]
    id: str
    created: int
    choices: list[CompletionComplete]
    model: str
    system_fingerprint: str
    usage: Usage | UnsetType = UNSET  # so far, if asked for


class VertexResponse(Struct, forbid_unknown_fields=True):
    """Answer of /vertex: one text per instance."""

    predictions: list[str]


class InferTensor(Struct, forbid_unknown_fields=True):
    """A text as the bytes of its UTF-8, in KServe's protocol."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES"]
    data: list[int]


class InferResponse(Struct, forbid_unknown_fields=True):
    """Answer of KServe's infer route."""

    id: str
    outputs: list[InferTensor]
