"""OpenAI's Responses API: answers, and the number of tokens that they would be computed from."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from tgi_trio.errors import GrammarError, PromptTooLong, naming_param
from tgi_trio.router.http.answer_fields import unix_now, use_model
from tgi_trio.router.http.answer_headers import compute_headers, event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.answer import ERRORS, Keep, ResponseEvents, response
from tgi_trio.router.http.dialects.responses.background import BackgroundResponse
from tgi_trio.router.http.dialects.responses.history import (
    keep_response,
    keeps,
    read_history,
    write_given,
)
from tgi_trio.router.http.dialects.responses.request import (
    check_served,
    to_conversation,
    to_parameters,
)
from tgi_trio.router.http.dialects.responses.text_logprobs import WANTED, TextLogprobs
from tgi_trio.router.http.dialects.responses.writing import (
    CARRIED,
    ItemWriter,
    ResponseWriter,
    copy_settings,
)
from tgi_trio.router.http.generation import (
    collect_results,
    explain,
    stream_events,
    take_permits,
    write_results,
)
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.logprobs import LogprobWriter
from tgi_trio.router.http.preparing import prepare
from tgi_trio.router.http.rendering import render_prompt
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.routes.stored_responses import read_log
from tgi_trio.router.http.routes.tokens import count_tokens, expand_text

_RESPONSES = BodyReader(schema.ResponsesRequest)
_MANY: Final = 256  # items that are kept: their conversion takes a millisecond or two


async def responses(call: Call) -> Reply:
    """POST /v1/responses, as a body or as a stream."""
    request: schema.ResponsesRequest = await call.read(_RESPONSES)
    call.engine.metrics.inc("tgi_request_count")
    model = await use_model(call, request.model)
    check_served(request, kept=call.responses.most > 0)
    most = call.engine.limits.max_grammar_bytes
    history = await read_history(call, request)
    convert = partial(to_conversation, request, history, most)
    conversation, box, updates = await call.make(convert, long=len(history.kept) >= _MANY)
    top = openai.alternatives(call, "top_logprobs", request.top_logprobs)
    parameters = to_parameters(request, most, top, updates.form)
    prepared = await prepare(call, conversation, parameters)
    take_permits(call)
    stored = keeps(call, request)
    if stored or history.conversation is not None:
        history = await write_given(call, history)
    settings = copy_settings(request, model, stored)
    writer = await call.compute(partial(ResponseWriter, settings, call.now(), call.ids))
    keep: Keep = partial(keep_response, call, history, writer.id, stored=stored)
    background = None
    if request.background:
        background = BackgroundResponse(call, writer.id, history, recorded=bool(request.stream))
        keep = background.keep
    carried = CARRIED in (request.include or ())
    summarised = request.reasoning is not None and request.reasoning.summary is not None
    items = ItemWriter(box, carried, summarised, call.ids, _text_logprobs(call, request))
    events = ResponseEvents(writer, items, prepared.reader(), unix_now, keep)
    try:
        form = "text.format" if updates.form is None else updates.form.path
        with naming_param(form, GrammarError):
            one = await prepared.validate(call, request)
    except PromptTooLong as error:
        if not request.stream:
            raise
        refused = events.error([], explain(call, error))
        return event_stream(call, refused, len(prepared.prompt))
    if background is not None:
        background.start(events, one)
        if background.log is None:
            return Reply(background.show(), headers=compute_headers(call, len(prepared.prompt)))
        return event_stream(call, read_log(call, background.log), len(prepared.prompt))
    if request.stream:
        return event_stream(call, await stream_events(call, [one], [events]), len(prepared.prompt))
    results = await collect_results(call, [one], keep_tokens=True)
    ((tokens, outcome),) = [(result.tokens, result.outcome) for result in results]
    write = partial(response, writer, items, prepared.reader(), tokens, outcome, unix_now)
    body, output = await write_results(call, results, write)
    keep(body, output)
    return Reply(body, headers=timing_headers(call, len(prepared.prompt), results))


async def input_tokens(call: Call) -> Reply:
    """POST /v1/responses/input_tokens: the number of tokens of the prompt for /v1/responses."""
    request: schema.ResponsesRequest = await call.read(_RESPONSES)
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, request.model)
    check_served(request, kept=call.responses.most > 0)
    history = await read_history(call, request)
    most = call.engine.limits.max_grammar_bytes
    convert = partial(to_conversation, request, history, most)
    conversation, _, _ = await call.make(convert, long=len(history.kept) >= _MANY)
    prompt = await expand_text(call, await render_prompt(call, conversation))
    count = await count_tokens(call, prompt)
    return Reply(msgspec.json.encode(replies.InputTokenCount(count)))


def _text_logprobs(call: Call, request: schema.ResponsesRequest) -> TextLogprobs | None:
    """Return what collects log-probabilities, if they are asked for, in either way."""
    if not request.top_logprobs and WANTED not in (request.include or ()):
        return None
    return TextLogprobs(LogprobWriter(call.text_processor.tokenizer))


ROUTES = (
    Route("POST", "/v1/responses", responses, dialect=ERRORS, images=True),
    Route("POST", "/v1/responses/input_tokens", input_tokens, dialect=ERRORS, images=True),
)
