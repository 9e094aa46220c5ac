"""Anthropic's Messages API and its token counts."""

from __future__ import annotations

from functools import partial

import orjson

from tgi_trio.router.http.answer_fields import use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.anthropic import schema
from tgi_trio.router.http.dialects.anthropic.answer import (
    AnswerEnd,
    MessageEvents,
    drop_token,
    message,
)
from tgi_trio.router.http.dialects.anthropic.request import to_conversation, to_parameters
from tgi_trio.router.http.generation import (
    collect_results,
    stream_events,
    take_permits,
    write_results,
)
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.error_shapes import ANTHROPIC
from tgi_trio.router.http.preparing import prepare
from tgi_trio.router.http.rendering import render_prompt
from tgi_trio.router.http.routes.tokens import count_tokens, expand_text

_MESSAGES = BodyReader(schema.MessagesRequest)
_COUNT = BodyReader(schema.CountTokensRequest)


async def messages(call: Call) -> Reply:
    """POST /v1/messages, as a body or as a stream."""
    request: schema.MessagesRequest = await call.read(_MESSAGES)
    call.engine.metrics.inc("tgi_request_count")
    model = await use_model(call, request.model)
    parameters = to_parameters(request, call.engine.limits.max_grammar_bytes)
    conversation = await call.make(partial(to_conversation, request))
    prepared = await prepare(call, conversation, parameters)
    take_permits(call)
    one = await prepared.validate(call, request)
    id = f"msg_{call.ids.randbytes(12).hex()}"
    end = AnswerEnd(len(one.prompt_ids), one.stopping.max_new_tokens < request.max_tokens)
    shown = request.thinking is None or request.thinking.display != "omitted"
    if request.stream:
        events = MessageEvents(id, model, prepared.reader(), end, show_thoughts=shown)
        return event_stream(call, await stream_events(call, [one], [events]), len(prepared.prompt))
    results = await collect_results(call, [one], keep_tokens=True)
    ((tokens, outcome),) = [(result.tokens, result.outcome) for result in results]
    if request.max_tokens == 0:
        tokens, outcome = [], drop_token(outcome)
    reader = prepared.reader()
    write = partial(message, id, model, reader, tokens, outcome, end, show_thoughts=shown)
    body = await write_results(call, results, write)
    return Reply(body, headers=timing_headers(call, len(prepared.prompt), results))


async def count_prompt(call: Call) -> Reply:
    """POST /v1/messages/count_tokens: the number of tokens of the prompt for /v1/messages."""
    request: schema.CountTokensRequest = await call.read(_COUNT)
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, request.model)
    conversation = await call.make(partial(to_conversation, request))
    prompt = await expand_text(call, await render_prompt(call, conversation))
    return Reply(orjson.dumps({"input_tokens": await count_tokens(call, prompt)}))


ROUTES = (
    Route("POST", "/v1/messages", messages, dialect=ANTHROPIC, images=True),
    Route("POST", "/v1/messages/count_tokens", count_prompt, dialect=ANTHROPIC, images=True),
)
