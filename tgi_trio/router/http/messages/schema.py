"""Bodies of requests, decoded and checked by msgspec.

Fields are as in TGI: `T | None = None` may be absent or null; `T = default` may be absent but not
null; unknown fields are ignored. Integers must be written as integers. Class names are those in the
OpenAPI document, which is generated from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType

from tgi_trio.errors import about
from tgi_trio.router.http.messages.component_refs import any_of
from tgi_trio.router.http.messages.enum_values import say_allowed
from tgi_trio.router.http.messages.problems import BodyRejected
from tgi_trio.router.http.messages.shared_fields import (
    I32,
    Count,
    Effort,
    Scheduling,
    Seed,
    SharedFields,
)
from tgi_trio.router.http.messages.surrogates import mend_surrogates
from tgi_trio.router.http.messages.tool_schema import ToolCall, ToolChoice, Tools
from tgi_trio.router.http.messages.unserved import CHAT, COMPLETION, AnyBytes, UnservedFields
from tgi_trio.router.text.chat_template import RESERVED

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# The upper limit, which msgspec cannot check, is checked with the other parameters.
U64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]
Json = Any


class GrammarType(Struct):
    """Constrained decoding: a JSON schema, a regular expression, a grammar or a list of texts."""

    type: Literal["json", "json_object", "json_schema", "regex", "lark", "choice"]
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


# One query, or up to --max-client-batch-size of them.
Inputs = str | Annotated[list[str], Meta(min_length=1)]


class GenerateRequest(Struct):
    """Body of /generate and /generate_stream."""

    inputs: Inputs
    # If absent, `{"do_sample": true}` applies, TGI's own oddity: see `parameters_of`.
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
    """What the answer must look like, in TGI's shape, OpenAI's, or llama.cpp's (`schema`)."""

    type: Literal["text", "json", "json_object", "json_schema", "regex", "lark", "choice"]
    value: Json = None
    json_schema: Json = None
    schema: Json = None


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
    max_tokens: U32 | None = None
    max_completion_tokens: U32 | None = None
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
    # Whether thoughts are shown (vLLM), and whether they are separated at all (SGLang).
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class CompletionRequest(SharedFields):
    """Body of /v1/completions."""

    unserved: ClassVar = COMPLETION

    prompt: str | list[str | I32 | list[I32]]  # texts, or token ids of one prompt or of several
    model: str | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    seed: Seed | None = None
    suffix: str | None = None
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


Body = TypeVar("Body")


class BodyReader:
    """Decodes bodies of one type; errors are worded as TGI's JSON extractor words them."""

    def __init__(self, shape: type[Body], *, mends: bool = False) -> None:
        """`mends`: halves of surrogate pairs are replaced; TGI's own routes refuse them."""
        self._shape, self._mends = shape, mends
        self._decoder = msgspec.json.Decoder(shape)
        self._unserved = UnservedFields(shape) if issubclass(shape, Scheduling) else None

    def read(self, headers: dict[bytes, bytes], body: AnyBytes, at: str = "") -> Any:
        """Return the decoded body. Raises BodyRejected (415, 400 or 422) and ValidationError.

        `at`: its place in the whole body, for errors.
        """
        if not _is_json(headers.get(b"content-type", b"")):
            raise BodyRejected(415, "Expected request with `Content-Type: application/json`")
        try:
            decoded = self._decoder.decode(body)
            if self._unserved is not None:
                self._unserved.check(body)
            return decoded
        except msgspec.ValidationError as error:
            raise BodyRejected(422, _shape_error(str(error), at, self._shape)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._mends and (mended := mend_surrogates(body)) is not None:
                return self.read(headers, mended, at)
            raise BodyRejected(400, _SYNTAX + _syntax_error(error, bytes(body))) from error
        except RecursionError as error:
            raise BodyRejected(400, _SYNTAX + "recursion limit exceeded") from error


class FirstFit:
    """Decodes a body as the first of several types that it fits."""

    def __init__(self, shapes: Mapping[str, type], needs: str) -> None:
        """`shapes`: types by a field that each must have; `needs`: the error if a body has none."""
        self._readers = {name: BodyReader(shape) for name, shape in shapes.items()}
        self._needs = needs

    def read(self, headers: dict[bytes, bytes], body: AnyBytes, at: str = "") -> Any:
        """Return the decoded body. Raises BodyRejected with the error of the intended type."""
        problem: BodyRejected | None = None
        for name, reader in self._readers.items():
            try:
                return reader.read(headers, body, at)
            except BodyRejected as error:
                if error.status != 422:
                    raise
                if f"missing required field `{name}`" not in str(error):
                    problem = problem or error
        raise problem or invalid_value(at or "body", self._needs)


_SYNTAX = "Failed to parse the request body as JSON: "
_SHAPE = "Failed to deserialize the JSON body into the target type: "


def convert_body(value: Json, shape: type[Body], path: str) -> Body:
    """Return a part of a body as `shape`. Raises BodyRejected (422) that names its `path`."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, inner = str(error).partition(" - at `$")
        inner = inner.rstrip("`")
        raise invalid_value(path + inner, say_allowed(what, shape, inner)) from error


def _is_json(content_type: bytes) -> bool:
    media = content_type.partition(b";")[0].strip().lower()
    kind, _, subtype = media.partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))


def _syntax_error(error: Exception, body: bytes) -> str:
    """Return an error's text; msgspec's is wrong for half a surrogate pair, as for an early end.

    Of bytes that are not UTF-8 it names the place in their string, which is none in the body.
    """
    if isinstance(error, UnicodeDecodeError):
        try:
            body.decode()
        except UnicodeDecodeError as whole:
            return f"{whole.reason} of UTF-8 (byte {whole.start}: 0x{body[whole.start]:02x})"
    if "truncated" in str(error):
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError as better:
            return str(better)
    return str(error)


def _shape_error(message: str, at: str, shape: type) -> str:
    """Turn "what - at `$.path`" into "path: what", as TGI's extractor writes it."""
    what, _, path = message.partition(" - at `$")
    what = say_allowed(what, shape, path.rstrip("`"))
    path = (at + path.rstrip("`")).lstrip(".")
    return f"{_SHAPE}{path}: {what}" if path else _SHAPE + what


def read_aliases(body: Struct, *names: str) -> Any:
    """Return the value of a field that a body may give by several names; None: by none.

    Some clients send all names, with one value. Raises BodyRejected for two values, in TGI's words.
    """
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"`{name}` = {value}" for name, value in given.items())
        what = f"duplicate field `{names[0]}`: {said} are names of one field, send one of them"
        raise about(BodyRejected(422, _SHAPE + what), names[0])
    return next(iter(given.values()), None)


def read_variables(given: Mapping[str, Any] | None, *fields: str) -> Mapping[str, Any]:
    """Return the template variables of `chat_template_kwargs`.

    Raises BodyRejected for one that `ChatTemplate.render` gets anyway, or that is among `fields`.
    """
    for name in given or {}:
        if name in RESERVED or name in fields:
            raise invalid_value("chat_template_kwargs", f"`{name}` has a field of its own")
    return given or {}


def invalid_value(path: str, what: str) -> BodyRejected:
    """Return the error for a field whose value has the wrong type."""
    return BodyRejected(422, f"{_SHAPE}{path}: {what}")
