"""OpenAI's chat completions, and /chat_tokenize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import to_builtins

from tgi_trio.errors import TemplateError
from tgi_trio.router.http import schema
from tgi_trio.router.http.errors import Refused
from tgi_trio.router.http.events import ChatEvents, Envelope, UsageCount, chat_usage_event
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
from tgi_trio.router.http.urgency import validated
from tgi_trio.router.validation import spread

_CHAT = schema.BodyReader(schema.ChatRequest)


async def chat_completions(call: Call) -> Reply:
    """POST /v1/chat/completions, as a body or as a stream."""
    request = _read(call)
    call.engine.metrics.inc("tgi_request_count")
    model = resolve_model(call, request.model)
    count = openai.choices(request.n, call.engine.limits.max_concurrent_requests)
    prompt = render_prompt(call, request)
    parameters = openai.wanted(request, top_n_tokens=request.top_logprobs)
    admit(call, count)
    one = await validated(call, prompt, parameters, request, add_special_tokens=False)
    requests = [one] if count == 1 else spread(one, count)
    logprobs = bool(request.logprobs)
    envelope = Envelope(unix_now(), model, fingerprint(call.settings))

    if request.stream:
        usage = UsageCount(len(one.prompt_ids))
        events = [ChatEvents(envelope, i, logprobs, usage) for i in range(count)]
        include_usage = request.stream_options.include_usage

        def last() -> bytes:
            return (chat_usage_event(envelope, usage) if include_usage else b"") + DONE

        return event_stream(call, pour(call, requests, events, last), len(prompt))

    results = await gather(call, requests, keep_tokens=logprobs)
    # A body is dated by its end, as TGI does it.
    body = _completion(replace(envelope, created=unix_now()), results, logprobs)
    return Reply(body, headers=timing_headers(call, len(prompt), results))


async def chat_tokenize(call: Call) -> Reply:
    """POST /chat_tokenize: the rendered prompt and its tokens."""
    request = _read(call)
    call.engine.metrics.inc("tgi_request_count")
    prompt = render_prompt(call, request)
    tokens = simple_tokens_json(await tokenized(call, prompt, add_special_tokens=False))
    return Reply(b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, text_json(prompt)))


def _read(call: Call) -> schema.ChatRequest:
    request: schema.ChatRequest = _CHAT.read(call.headers, call.body)
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None:
            raise schema.duplicate_field("max_tokens")
        request.max_tokens = request.max_completion_tokens
    return request


def render_prompt(call: Call, request: schema.ChatRequest) -> str:
    """Return the prompt that the model's template makes of the messages.

    Raises TemplateError, and Refused for what is not supported.
    """
    _refuse_unsupported(request)
    template = call.engine.chat_template
    if template is None:
        raise TemplateError("template not found")
    messages = [_template_message(message, i) for i, message in enumerate(request.messages)]
    continued = request.continue_final_message
    if continued is None:  # TGI continues a final message of the assistant by itself
        last = messages[-1] if messages else {}
        continued = last.get("role") == "assistant" and bool(last.get("content"))
    add_prompt = request.add_generation_prompt
    return template.render(
        messages,
        add_generation_prompt=True if add_prompt is None else add_prompt,
        continue_final_message=continued,
        **_variables(request.chat_template_kwargs),
    )


_OURS = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def _variables(given: dict[str, Any] | None) -> dict[str, Any]:
    variables = given or {}
    for name in variables:
        if name in _OURS:
            raise schema.invalid("chat_template_kwargs", f"`{name}` has a field of its own")
    return variables


def _template_message(message: schema.Message, i: int) -> dict[str, Any]:
    """Return a message as templates expect it: plain values, text content in one piece."""
    fields: dict[str, Any] = to_builtins(message)
    if isinstance(message.content, list):
        fields["content"] = "".join(_text_of(chunk, i) for chunk in message.content)
    elif message.content is None and message.tool_calls is None:
        raise schema.invalid(f"messages[{i}]", "needs `content` or `tool_calls`")
    return {name: value for name, value in fields.items() if value is not None}


def _text_of(chunk: schema.MessageChunk, i: int) -> str:
    if chunk.type == "image_url":
        text = f"messages[{i}] holds an image, and images are not supported yet"
        raise Refused(422, f"Input validation error: {text}", "validation")
    if chunk.text is None:
        raise schema.invalid(f"messages[{i}].content", "a text part needs `text`")
    return chunk.text


def _refuse_unsupported(request: schema.ChatRequest) -> None:
    form = request.response_format
    constrained = form is not None and form.type != "text"
    if request.tools and request.tool_choice != "none":
        if constrained:
            text = "Tool error: Grammar and tools are mutually exclusive"
        else:
            text = "Tool error: tools are not supported yet"
        raise Refused(422, text, "tool_error")
    if constrained:
        text = "Input validation error: `response_format` is not supported yet"
        raise Refused(422, text, "validation")


def _completion(envelope: Envelope, results: list[Result], logprobs: bool) -> bytes:
    usage = UsageCount(results[0].outcome.prompt_tokens)
    choices = []
    for i, result in enumerate(results):
        outcome = result.outcome
        usage.completion_tokens += outcome.generated_tokens
        choices.append(
            b'{"index":%d,"message":{"role":"assistant","content":%b},"logprobs":%b,'
            b'"finish_reason":%b}'
            % (
                i,
                text_json(outcome.text),
                chat_logprobs_json(result.tokens) if logprobs else b"null",
                OPENAI_REASONS[outcome.reason],
            )
        )
    return b'{"object":"chat.completion","id":"",%b,"choices":[%b],"usage":%b}' % (
        envelope.fields(),
        b",".join(choices),
        usage.json(),
    )


ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, openai=True),
    Route("POST", "/chat_tokenize", chat_tokenize, protected=False),
)
