"""OpenAI's chat completions, and /chat_tokenize."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tgi_trio.errors import GrammarError, ValidationError, naming_param
from tgi_trio.router.http.answer_fields import fingerprint, new_id, unix_now, use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.chat import to_conversation
from tgi_trio.router.http.generation import (
    Result,
    collect_results,
    stream_events,
    take_permits,
    write_results,
)
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader, read_aliases
from tgi_trio.router.http.messages.error_shapes import OpenAIShape
from tgi_trio.router.http.messages.events import ChatEvents, Envelope, Events, chat_usage_event
from tgi_trio.router.http.messages.extras import TokenExtras, prompt_ids_json, token_ids_json
from tgi_trio.router.http.messages.logprobs import prompt_logprobs_json, prompt_tokens
from tgi_trio.router.http.messages.render import ending_json, text_json
from tgi_trio.router.http.messages.response_format import answer_grammar, forms
from tgi_trio.router.http.messages.tool_calls import (
    ReadChatEvents,
    answer_tokens,
    message_json,
    read_answer,
)
from tgi_trio.router.http.messages.usage import StreamUsage, UsageCount
from tgi_trio.router.http.preparing import Prepared, prepare
from tgi_trio.router.http.rendering import render_prompt
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.routes.tokens import expand_text, write_tokens
from tgi_trio.router.http.sse import DONE
from tgi_trio.router.request import Request
from tgi_trio.router.text.tag_calls import CallPlace
from tgi_trio.router.validation import fan_out

_CHAT = BodyReader(schema.ChatRequest)


async def chat_completions(call: Call) -> Reply:
    """POST /v1/chat/completions, as a body or as a stream."""
    request: schema.ChatRequest = await call.read(_CHAT)
    call.engine.metrics.inc("tgi_request_count")
    model = await use_model(call, request.model)
    count = openai.choices(request.n, call.engine.limits.max_concurrent_requests)
    prepared = await prepare_chat(call, request)
    prompt = prepared.prompt
    take_permits(call, generations=count)
    with naming_param(next(iter(forms(request)), None), GrammarError):
        one = await prepared.validate(call, request)
    requests = [one] if count == 1 else fan_out(one, count)
    shown = openai.choose_shown(call, request, logprobs=bool(request.logprobs))
    envelope = Envelope(new_id(call, "chatcmpl"), call.now(), model, fingerprint(call.settings))

    if request.stream:
        usage = UsageCount(len(one.prompt_ids))
        events = [
            _events(envelope, i, each, usage, shown, prepared) for i, each in enumerate(requests)
        ]
        include_usage = StreamUsage.from_options(request.stream_options).last

        def last() -> bytes:
            return (chat_usage_event(envelope, usage) if include_usage else b"") + DONE

        return event_stream(call, await stream_events(call, requests, events, last), len(prompt))

    keep = shown.logprobs is not None or shown.token_ids or not prepared.plain
    results = await collect_results(call, requests, keep_tokens=keep)
    # As in TGI, a body has the time of its end.
    ended = replace(envelope, created=unix_now())

    def write() -> bytes:
        body = _completion(ended, results, shown, prepared)
        return body + _prompt_fields(call, request, results[0], shown) + b"}"

    body = await write_results(call, results, write)
    return Reply(body, headers=timing_headers(call, len(prompt), results))


async def chat_tokenize(call: Call) -> Reply:
    """POST /chat_tokenize: the rendered prompt and its tokens."""
    request: schema.ChatRequest = await call.read(_CHAT)
    call.engine.metrics.inc("tgi_request_count")
    if request.model is not None and call.engine.adapters.serves(request.model):
        await use_model(call, request.model)  # any other name is as good as none, as in TGI
    conversation = await call.make(partial(to_conversation, call, request))
    prompt = await expand_text(call, await render_prompt(call, conversation))
    tokens = await write_tokens(call, prompt, add_special_tokens=False)
    return Reply(b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, text_json(prompt)))


async def prepare_chat(call: Call, request: schema.ChatRequest) -> Prepared:
    """Return a chat prepared for generation.

    Raises TemplateError, ValidationError and what `to_conversation` raises.
    """
    request.max_tokens = read_aliases(request, "max_tokens", "max_completion_tokens")
    conversation = await call.make(partial(to_conversation, call, request))
    if request.top_logprobs and not request.logprobs:
        raise ValidationError("`top_logprobs` needs `logprobs` to be true")
    most = call.engine.limits.max_grammar_bytes
    grammar = None
    if not conversation.functions or conversation.tagged:
        texts, called = call.text_processor, bool(conversation.functions)
        added = texts.tokenizer.added_tokens
        thought = "" if texts.thoughts is None else texts.thoughts.marks.start
        calls = CallPlace.of(texts.call_style.format, called=called, thought=thought)
        grammar = await answer_grammar(request, most, added, calls)
    of_prompt = openai.prompt_alternatives(call, request)
    parameters = openai.to_parameters(
        call,
        request,
        top_n_tokens=openai.alternatives(call, "top_logprobs", request.top_logprobs),
        decoder_input_details=of_prompt is not None,
        prompt_top_n=of_prompt or 0,
        grammar=grammar,
    )
    return await prepare(call, conversation, parameters)


def _events(
    envelope: Envelope,
    index: int,
    request: Request,
    usage: UsageCount,
    shown: TokenExtras,
    prepared: Prepared,
) -> Events:
    extras = shown.extras(request)
    if prepared.plain:
        return ChatEvents(envelope, index, usage, shown, extras)
    reader, tools = prepared.reader(), prepared.tools is not None
    custom = prepared.conversation.custom
    return ReadChatEvents(envelope, index, usage, reader, shown, extras, tools=tools, custom=custom)


def _completion(
    envelope: Envelope, results: list[Result], shown: TokenExtras, prepared: Prepared
) -> bytes:
    """Return the body up to and including its usage."""
    usage = UsageCount(results[0].outcome.prompt_tokens)
    choices = []
    for i, result in enumerate(results):
        usage.add(result.outcome)
        message, ending = _answer(result, prepared)
        choices.append(
            b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (
                i,
                message,
                _logprobs(result, shown),
                ending,
                token_ids_json(result.tokens) if shown.token_ids else b"",
            )
        )
    return b'{"object":"chat.completion",%b,"choices":[%b],"usage":%b' % (
        envelope.fields(),
        b",".join(choices),
        usage.json(),
    )


def _prompt_fields(
    call: Call, request: schema.ChatRequest, result: Result, shown: TokenExtras
) -> bytes:
    """Return the fields about the prompt, which all choices share, each after a comma."""
    fields = prompt_ids_json(result.request) if shown.token_ids else b""
    top = openai.prompt_alternatives(call, request)
    if top is None:
        return fields
    tokens = prompt_tokens(call.text_processor.tokenizer, result.request, result.outcome)
    return fields + b',"prompt_logprobs":%b' % prompt_logprobs_json(tokens, top)


def _answer(result: Result, prepared: Prepared) -> tuple[bytes, bytes]:
    """Return the message and the finish reason (`ending_json`) of one choice."""
    outcome = result.outcome
    if prepared.plain:
        content = text_json(outcome.text)
        return b'{"role":"assistant","content":%b}' % content, ending_json(outcome)
    reader = prepared.reader()
    answer = read_answer(reader, result.tokens, outcome.tail)
    return message_json(answer, outcome, prepared.conversation.custom), reader.ending(outcome)


def _logprobs(result: Result, shown: TokenExtras) -> bytes:
    if shown.logprobs is None:
        return b"null"
    return shown.logprobs.chat(answer_tokens(result.tokens))


_ERRORS = OpenAIShape(
    openai.all_fields(schema.ChatRequest),
    {**openai.RENAMED, "inputs": "messages", "top_n_tokens": "top_logprobs"},
)

ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, dialect=_ERRORS, images=True),
    Route("POST", "/chat_tokenize", chat_tokenize, protected=False, images=True),
)
