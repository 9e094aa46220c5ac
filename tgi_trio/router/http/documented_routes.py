"""Every documented route: what it takes and what it answers. `openapi.py` writes the document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tgi_trio.router.http.dialects.anthropic import replies as anthropic
from tgi_trio.router.http.dialects.anthropic import schema as anthropic_schema
from tgi_trio.router.http.dialects.llama_cpp import replies as llama_cpp
from tgi_trio.router.http.dialects.llama_cpp import schema as llama_cpp_schema
from tgi_trio.router.http.dialects.responses import replies as responses
from tgi_trio.router.http.dialects.responses import schema as responses_schema
from tgi_trio.router.http.messages import (
    replies,
    schema,
    service_replies,
    token_schema,
    transcriptions,
)
from tgi_trio.router.http.messages.component_refs import any_of

NO_KEY: Final = "The API key is missing or wrong"


@dataclass(frozen=True, slots=True)
class Operation:
    """One documented route."""

    method: str
    path: str
    summary: str
    body: Any = None  # a Struct
    reply: Any = None  # a type
    events: Any = None  # the type of its events, where it streams
    failures: tuple[int, ...] = ()
    query: tuple[str, ...] = ()  # names of what may stand behind its path
    reply_type: str = "application/json"
    body_type: str = "application/json"
    plain: bool = False  # it answers with plain text, if that is asked for
    # What it answers when something is wrong, where that is not TGI's or OpenAI's: by status, in
    # one shape.
    own_failures: Mapping[int, str] | None = None
    failure: Any = None


_ANTHROPIC_FAILURES = {
    400: "The body or what it asks for cannot be served",
    401: NO_KEY,
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is larger than --payload-limit",
    429: "Model is overloaded",
    500: "Generation failed, or an internal error",
    529: "Not serving",
}

_RESPONSES_FAILURES = {
    **{status: text for status, text in _ANTHROPIC_FAILURES.items() if status != 529},
    503: "Not serving",
}

_STORED_FAILURES = {
    **{status: _RESPONSES_FAILURES[status] for status in (400, 401, 500)},
    404: "No such response, or it is not kept any more",
}


def _of_conversations(
    method: str, below: str, summary: str, reply: Any, body: Any = None
) -> Operation:
    """Return an operation of /v1/conversations; `below`: the rest of its path."""
    return Operation(
        method,
        f"/v1/conversations{below}",
        summary,
        body,
        reply,
        own_failures={**_STORED_FAILURES, 404: "No such conversation, or item of it"},
        failure=responses.ResponsesErrorResponse,
    )


_CONVERSATIONS: tuple[Operation, ...] = (
    _of_conversations(
        *("post", "", "Keep a conversation"),
        *(responses.ConversationReply, responses_schema.ConversationRequest),
    ),
    _of_conversations("get", "/{id}", "Show a conversation", responses.ConversationReply),
    _of_conversations(
        *("post", "/{id}", "Replace what is noted of a conversation"),
        *(responses.ConversationReply, responses_schema.ConversationUpdate),
    ),
    _of_conversations("delete", "/{id}", "Forget it", responses.ConversationDeleted),
    _of_conversations("get", "/{id}/items", "List its items", responses.InputItemList),
    _of_conversations(
        *("post", "/{id}/items", "Add items to it"),
        *(responses.InputItemList, responses_schema.ConversationItems),
    ),
    _of_conversations("get", "/{id}/items/{item}", "Show an item of it", dict[str, Any]),
    _of_conversations("delete", "/{id}/items/{item}", "Remove it", responses.ConversationReply),
)

_KSERVE = "/v2/models/{model}/versions/{version}"

_GENERATION = (404, 422, 424, 429, 500, 503)

OPERATIONS = (
    Operation(
        "post",
        "/",
        "Generate tokens if `stream == false` or a stream of tokens if `stream == true`",
        schema.CompatGenerateRequest,
        list[replies.GenerateResponse],
        replies.StreamResponse,
        _GENERATION,
    ),
    Operation(
        "post",
        "/generate",
        "Generate tokens, for one query or a list of them",
        schema.GenerateRequest,
        replies.GenerateResponse | list[replies.GenerateResponse],
        None,
        _GENERATION,
    ),
    Operation(
        "post",
        "/generate_stream",
        "Generate a stream of tokens using Server-Sent Events",
        schema.GenerateRequest,
        None,
        replies.StreamResponse,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        schema.ChatRequest,
        replies.ChatCompletion,
        replies.ChatCompletionChunk,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation: OpenAI's Responses",
        responses_schema.ResponsesRequest,
        responses.ResponseReply,
        responses.ResponseEvent,
        own_failures=_RESPONSES_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a conversation: OpenAI's Responses",
        responses_schema.ResponsesRequest,
        responses.InputTokenCount,
        own_failures=_RESPONSES_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "get",
        "/v1/responses/{id}",
        "Show a response that is kept or that runs, or its events",
        reply=responses.ResponseReply,
        events=responses.ResponseEvent,
        query=("stream", "starting_after"),
        own_failures=_STORED_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "Forget a response",
        reply=responses.ResponseDeleted,
        own_failures=_STORED_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "post",
        "/v1/responses/{id}/cancel",
        "End a response that runs in the background",
        reply=responses.ResponseReply,
        own_failures=_STORED_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "List the items that a response answers",
        reply=responses.InputItemList,
        own_failures=_STORED_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    Operation(
        "post",
        "/v1/responses/compact",
        "Make a conversation shorter: its user's messages, and a summary of all else",
        responses_schema.CompactRequest,
        responses.CompactionReply,
        own_failures=_RESPONSES_FAILURES,
        failure=responses.ResponsesErrorResponse,
    ),
    *_CONVERSATIONS,
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation: Anthropic's Messages",
        anthropic_schema.MessagesRequest,
        anthropic.MessageReply,
        anthropic.MessageEvent,
        own_failures=_ANTHROPIC_FAILURES,
        failure=anthropic.AnthropicErrorResponse,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation: Anthropic's Messages",
        anthropic_schema.CountTokensRequest,
        anthropic.TokenCount,
        own_failures=_ANTHROPIC_FAILURES,
        failure=anthropic.AnthropicErrorResponse,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Complete one prompt or several",
        schema.CompletionRequest,
        replies.CompletionFinal,
        replies.Chunk,
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/fim/completions",
        "Fill the gap between two texts: Mistral's",
        schema.FimRequest,
        replies.ChatCompletion,
        replies.ChatCompletionChunk,
        _GENERATION,
    ),
    Operation(
        "post",
        "/infill",
        "Fill the gap between two texts: llama.cpp's",
        llama_cpp_schema.InfillRequest,
        llama_cpp.InfillReply,
        Annotated[Any, any_of("InfillEvent", "InfillReply")],
        _GENERATION,
    ),
    Operation(
        "post",
        "/v1/audio/transcriptions",
        "Write down what is said in a sound",
        transcriptions.TranscriptionForm,
        transcriptions.TranscriptionReply,
        transcriptions.TranscriptionEvent,
        _GENERATION,
        body_type="multipart/form-data",
        plain=True,
    ),
    Operation(
        "post",
        "/invocations",
        "What POST /, chat or completions answer: for SageMaker",
        Annotated[Any, any_of("CompatGenerateRequest", "ChatRequest", "CompletionRequest")],
        Annotated[Any, any_of("GenerateResponse[]", "ChatCompletion", "CompletionFinal")],
        Annotated[Any, any_of("StreamResponse", "ChatCompletionChunk", "Chunk")],
        _GENERATION,
    ),
    Operation(
        "post",
        "/vertex",
        "Generate a text for each instance: for Vertex AI",
        schema.VertexRequest,
        replies.VertexResponse,
        failures=_GENERATION,
    ),
    Operation("get", "/v2", "Server metadata: KServe", reply=service_replies.Metadata),
    Operation(
        "get", "/v2/health/live", "Whether the server answers: KServe", reply=service_replies.Live
    ),
    Operation(
        "get",
        "/v2/health/ready",
        "Health check: KServe",
        reply=service_replies.Live,
        failures=(503,),
    ),
    Operation(
        "get", _KSERVE, "Model metadata: KServe", reply=service_replies.Metadata, failures=(404,)
    ),
    Operation(
        "get",
        _KSERVE + "/ready",
        "Health check: KServe",
        reply=service_replies.Live,
        failures=(404, 503),
    ),
    Operation(
        "post",
        _KSERVE + "/infer",
        "Generate a text for each input: KServe",
        schema.InferRequest,
        replies.InferResponse,
        failures=_GENERATION,
    ),
    Operation(
        "get",
        "/v1/models",
        "List the served models; with `anthropic-version` in Anthropic's shape",
        reply=Annotated[Any, any_of("ModelsInfo", "AnthropicModels")],
    ),
    Operation(
        "get",
        "/v1/models/{name}",
        "Describe a served model",
        reply=Annotated[Any, any_of("ModelInfo", "AnthropicModel")],
        failures=(404,),
    ),
    Operation(
        "post",
        "/tokenize",
        "Tokenize inputs (TGI's form), or a prompt or a chat (vLLM's)",
        Annotated[Any, any_of("TokenizeRequest", "TokenizePromptRequest", "TokenizeChatRequest")],
        Annotated[Any, any_of("SimpleToken[]", "TokenizeResponse")],
        failures=(404, 422, 500),
    ),
    Operation(
        "post",
        "/detokenize",
        "Turn tokens into text",
        token_schema.DetokenizeRequest,
        service_replies.DetokenizeResponse,
        failures=(404, 422, 500),
    ),
    Operation(
        "get",
        "/tokenizer_info",
        "Special tokens",
        reply=service_replies.TokenizerInfo,
        query=("model",),
        failures=(400, 404, 422),
    ),
    Operation(
        "post",
        "/chat_tokenize",
        "Render a conversation and tokenize it",
        schema.ChatRequest,
        service_replies.ChatTokenizeResponse,
        failures=(422, 500),
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Serve another adapter; with --adapter-updates",
        token_schema.LoadAdapterRequest,
        str,
        failures=(404, 422),
        reply_type="text/plain",
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Serve an adapter no longer; with --adapter-updates",
        token_schema.UnloadAdapterRequest,
        str,
        failures=(404, 422),
        reply_type="text/plain",
    ),
    Operation(
        "get",
        "/info",
        "Model and limits",
        reply=service_replies.Info,
        query=("model",),
        failures=(400, 404, 422),
    ),
    Operation("get", "/version", "Version of the server", reply=service_replies.Version),
    Operation("get", "/live", "That the router answers", reply=dict[str, bool]),
    Operation("get", "/ready", "Health check", reply=dict[str, bool], failures=(503,)),
    Operation("get", "/health", "Health check", failures=(503,)),
    Operation("get", "/ping", "Health check: SageMaker", failures=(503,)),
    Operation("get", "/metrics", "Prometheus metrics", reply=str, reply_type="text/plain"),
)
