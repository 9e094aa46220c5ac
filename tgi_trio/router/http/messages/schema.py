"""Bodies of requests, as msgspec checks them.

Fields are as in TGI: `T | None = None` may be absent or null; `T = default` may be absent but not
null; unknown fields are ignored. Integers must be written as integers. Class names are those in the
OpenAPI document, which is generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tgi_trio.router.http.messages.component_refs import any_of
from tgi_trio.router.http.messages.shared_fields import (
    I32,
    Count,
    Effort,
    Json,
    Scheduling,
    Seed,
    SharedFields,
)
from tgi_trio.router.http.messages.tool_schema import ToolCall, ToolChoice, Tools
from tgi_trio.router.http.messages.unserved import CHAT, COMPLETION

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# The upper limit, which msgspec cannot check, is checked with the other parameters.
U64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]


class GrammarType(Struct):
    """Constrained decoding: a JSON schema, a regular expression, a grammar or a list of texts."""

    type: Literal["json", "json_object", "json_schema", "regex", "lark", "choice", "structural_tag"]
    value: Json


class GenerateParameters(Scheduling):
    """How to generate."""

    best_of: U32 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: I32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: U32 | None = None
    return_full_text: bool | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    truncate: U32 | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    grammar: GrammarType | None = None
    adapter_id: str | None = None
    # Not in TGI.
    min_new_tokens: U32 | None = None
    no_repeat_ngram_size: U32 | None = None
    no_repeat_ngram_window: U32 | None = None
    no_repeat_ngram_whitelist: list[int] | None = None


# One query, or up to --max-client-batch-size of them.
Inputs = str | Annotated[list[str], Meta(min_length=1)]


class GenerateRequest(Struct):
    """Body of /generate and /generate_stream."""

    inputs: Inputs
    # If absent, `{"do_sample": true}` applies, TGI's own oddity: see `read_parameters`.
    parameters: GenerateParameters | UnsetType = UNSET


class CompatGenerateRequest(Struct):
    """Body of POST /."""

    inputs: Inputs
    parameters: GenerateParameters | UnsetType = UNSET
    stream: bool = False


class Url(Struct):
    """Where an image, a video or a sound is."""

    url: str


class AudioData(Struct):
    """A sound itself. Its format is told by its bytes."""

    data: str  # base64
    format: str | None = None


CHUNK_TYPES = (
    *("text", "image_url", "video_url", "input_audio", "audio_url"),
    *("thinking", "refusal"),
)


class MessageChunk(Struct):
    """A part of a message's content."""

    # Other types are refused later, with a message that lists the served ones.
    type: Annotated[str, Meta(extra_json_schema={"enum": list(CHUNK_TYPES)})]
    text: str | None = None
    image_url: Url | None = None
    video_url: Url | None = None  # as vLLM and SGLang have it
    input_audio: AudioData | None = None
    audio_url: Url | None = None  # as vLLM and SGLang have it
    thinking: str | None = None  # the model's thought in an earlier turn, in Mistral's form
    refusal: str | None = None  # what a model said in an earlier turn instead of an answer


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[MessageChunk] | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # said in an earlier turn instead of an answer
    function_call: Json = None  # refused: older than `tool_calls`
    # The model's thought in an earlier turn, under the names that templates read.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class StreamOptions(Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk


class ResponseFormat(Struct):
    """What the answer must look like, in the shape of TGI, OpenAI, llama.cpp (`schema`) or vLLM."""

    type: Literal[
        "text",
        "json",
        "json_object",
        "json_schema",
        "regex",
        "lark",
        "choice",
        "structural_tag",
    ]
    value: Json = None
    json_schema: Json = None
    schema: Json = None
    # Of a structural tag, as vLLM and SGLang have it: the first, or in older requests the others.
    format: Json = None
    structures: Json = None
    triggers: Json = None


class ChatReasoning(Struct, forbid_unknown_fields=True):
    """How to think before the answer, as in OpenRouter's API."""

    effort: Effort | None = None
    max_tokens: Count | None = None  # of the thought
    exclude: bool | None = None  # whether it is left out of the answer
    enabled: bool | None = None
    summary: str | None = None  # taken: thoughts are whole


class ChatThinking(Struct, forbid_unknown_fields=True):
    """Whether to think before the answer, as in DeepSeek's, Z.ai's and Kimi's APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None


class ChatRequest(SharedFields):
    """Body of /v1/chat/completions and /chat_tokenize."""

    unserved: ClassVar = CHAT

    messages: list[Message]
    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_tokens: Count | None = None  # -1: as many as there is room for, as at LM Studio
    max_completion_tokens: Count | None = None
    n: U32 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    seed: Seed | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Tools | None = None
    tool_prompt: str | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but sent by benchmark tools and by clients of other servers.
    top_k: I32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's: `fps` or `num_frames`, how many frames are seen of each video.
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # for templates that render them
    reasoning_effort: Effort | None = None  # for templates that read it, or a switch
    # Most tokens of a thought, -1 for no limit: vLLM's, SGLang's and llama.cpp's names.
    thinking_token_budget: Count | None = None
    max_think_tokens: Count | None = None
    thinking_budget_tokens: Count | None = None
    thinking_budget: Count | None = None  # Qwen's API
    # Whether there are thoughts, and how long they are: OpenRouter's, DeepSeek's, Qwen's API.
    reasoning: ChatReasoning | None = None
    thinking: ChatThinking | None = None
    enable_thinking: bool | None = None
    # Whether thoughts are shown (vLLM), and whether they are separated at all (SGLang).
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class ExtraFile(Struct):
    """A part of another file, written in front of a gap: llama.cpp's."""

    text: str
    filename: str | None = None


class CompletionRequest(SharedFields):
    """Body of /v1/completions."""

    unserved: ClassVar = COMPLETION

    prompt: str | list[str | I32 | list[I32]]  # texts, or token ids of one prompt or of several
    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    seed: Seed | None = None
    suffix: str | None = None
    input_extra: list[ExtraFile] | None = None  # with a suffix: parts of other files
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    n: U32 | None = None
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None


class FimRequest(Scheduling):
    """Body of /v1/fim/completions, Mistral's: the texts before and behind a gap."""

    prompt: str
    suffix: str | None = None
    input_extra: list[ExtraFile] | None = None  # llama.cpp's: parts of other files
    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    random_seed: Seed | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None  # the client's own; nothing here reads it


class VertexInstance(Struct):
    """A prompt among the instances of /vertex."""

    inputs: str
    parameters: GenerateParameters | UnsetType = UNSET


class VertexRequest(Struct):
    """Body of /vertex: prompts and conversations."""

    instances: list[Annotated[msgspec.Raw, any_of("VertexInstance", "ChatRequest")]]


class InferInput(Struct):
    """A prompt in KServe's v2 protocol: a tensor of the bytes of its UTF-8."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Annotated[int, Meta(ge=0, le=255)]]


class InferOutput(Struct):
    """The name of an output."""

    name: str


class InferRequest(Struct):
    """Body of /v2/models/{model}/versions/{version}/infer."""

    inputs: Annotated[list[InferInput], Meta(min_length=1)]
    outputs: list[InferOutput]
    id: str = ""
    parameters: GenerateParameters | UnsetType | None = UNSET
