"""OpenAI's chat completions, and /chat_tokenize."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.errors import GrammarError
from tgi_trio.router.http import schema
from tgi_trio.router.http.conversation import ChatTools, blame, chat_tools, render_prompt
from tgi_trio.router.http.events import (
    ChatEvents,
    Envelope,
    Events,
    UsageCount,
    chat_usage_event,
)
from tgi_trio.router.http.exchange import Call, Reply, Route
from tgi_trio.router.http.generation import (
    Result,
    admit,
    event_stream,
    fingerprint,
    gather,
    pour,
    resolve_model,
    timing_headers,
    unix_now,
)
from tgi_trio.router.http.render import OPENAI_REASONS, chat_logprobs_json, text_json
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.routes.operations import simple_tokens_json, tokenized
from tgi_trio.router.http.sse import DONE
from tgi_trio.router.http.tool_calls import ToolChatEvents, message_json, read_answer
from tgi_trio.router.http.urgency import validated
from tgi_trio.router.validation import GenerateParameters, spread

_CHAT = schema.BodyReader(schema.ChatRequest)


async def chat_completions(call: Call) -> Reply:
    """POST /v1/chat/completions, as a body or as a stream."""
    request = _read(call)
    call.engine.metrics.inc("tgi_request_count")
    model = resolve_model(call, request.model)
    count = openai.choices(request.n, call.engine.limits.max_concurrent_requests)
    tools = chat_tools(call, request)
    prompt, parameters = asked(call, request, tools)
    admit(call, count)
    try:
        one = await validated(call, prompt, parameters, request, add_special_tokens=False)
    except GrammarError:
        if tools is not None:
            await blame(call, tools)
        raise
    requests = [one] if count == 1 else spread(one, count)
    logprobs = bool(request.logprobs)
    envelope = Envelope(unix_now(), model, fingerprint(call.settings))

    if request.stream:
        usage = UsageCount(len(one.prompt_ids))
        events = [_events(envelope, i, logprobs, usage, tools) for i in range(count)]
        include_usage = request.stream_options.include_usage

        def last() -> bytes:
            return (chat_usage_event(envelope, usage) if include_usage else b"") + DONE

        return event_stream(call, pour(call, requests, events, last), len(prompt))

    results = await gather(call, requests, keep_tokens=logprobs or tools is not None)
    # A body is dated by its end, as TGI does it.
    body = _completion(replace(envelope, created=unix_now()), results, logprobs, tools)
    return Reply(body, headers=timing_headers(call, len(prompt), results))


async def chat_tokenize(call: Call) -> Reply:
    """POST /chat_tokenize: the rendered prompt and its tokens."""
    request = _read(call)
    call.engine.metrics.inc("tgi_request_count")
    prompt = render_prompt(call, request, chat_tools(call, request))
    tokens = simple_tokens_json(await tokenized(call, prompt, add_special_tokens=False))
    return Reply(b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, text_json(prompt)))


def _read(call: Call) -> schema.ChatRequest:
    request: schema.ChatRequest = _CHAT.read(call.headers, call.body)
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None:
            raise schema.duplicate_field("max_tokens")
        request.max_tokens = request.max_completion_tokens
    return request


def asked(
    call: Call, request: schema.ChatRequest, tools: ChatTools | None
) -> tuple[str, GenerateParameters]:
    """Return a chat as a prompt and its parameters.

    Raises TemplateError, ValidationError and what `render_prompt` raises.
    """
    prompt = render_prompt(call, request, tools)
    parameters = openai.wanted(request, top_n_tokens=request.top_logprobs)
    if tools is not None:
        parameters = replace(parameters, grammar=tools.grammar())
    return prompt, parameters


def _events(
    envelope: Envelope, index: int, logprobs: bool, usage: UsageCount, tools: ChatTools | None
) -> Events:
    if tools is None:
        return ChatEvents(envelope, index, logprobs, usage)
    return ToolChatEvents(envelope, index, logprobs, usage, tools.reader())


def _completion(
    envelope: Envelope, results: list[Result], logprobs: bool, tools: ChatTools | None
) -> bytes:
    usage = UsageCount(results[0].outcome.prompt_tokens)
    choices = []
    for i, result in enumerate(results):
        usage.completion_tokens += result.outcome.generated_tokens
        message, reason = _answer(result, tools)
        choices.append(
            b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b}'
            % (i, message, chat_logprobs_json(result.tokens) if logprobs else b"null", reason)
        )
    return b'{"object":"chat.completion","id":"",%b,"choices":[%b],"usage":%b}' % (
        envelope.fields(),
        b",".join(choices),
        usage.json(),
    )


def _answer(result: Result, tools: ChatTools | None) -> tuple[bytes, bytes]:
    """Return the message and the finish reason of one choice, as JSON."""
    outcome = result.outcome
    if tools is None:
        content = text_json(outcome.text)
        return b'{"role":"assistant","content":%b}' % content, OPENAI_REASONS[outcome.reason]
    reader = tools.reader()
    answer = read_answer(reader, result.tokens, outcome.tail)
    return message_json(answer), reader.finish_reason(outcome)


ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, openai=True),
    Route("POST", "/chat_tokenize", chat_tokenize, protected=False),
)
