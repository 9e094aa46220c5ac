"""OpenAI's compaction of conversations."""

from __future__ import annotations

from functools import partial

import msgspec

from tgi_trio.router.http.answer_fields import use_model
from tgi_trio.router.http.answer_headers import timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.answer import ERRORS, count_usage
from tgi_trio.router.http.dialects.responses.compaction import (
    add_task,
    check_summary,
    list_output,
    silence,
    to_request,
)
from tgi_trio.router.http.dialects.responses.history import read_history
from tgi_trio.router.http.dialects.responses.request import to_conversation, to_parameters
from tgi_trio.router.http.generation import collect_results, take_permits
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.tool_calls import read_answer
from tgi_trio.router.http.preparing import prepare

_COMPACT = BodyReader(schema.CompactRequest)


async def compact(call: Call) -> Reply:
    """POST /v1/responses/compact: what takes the place of a conversation that grew too long."""
    body: schema.CompactRequest = await call.read(_COMPACT)
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, body.model)
    request = to_request(body)
    history = await read_history(call, request)
    most = call.engine.limits.max_grammar_bytes
    asked = add_task(history)
    conversation, _, _ = await call.make(partial(to_conversation, request, asked, most))
    prepared = await prepare(call, silence(conversation), to_parameters(request, most, None))
    take_permits(call)
    one = await prepared.validate(call, body)
    (result,) = results = await collect_results(call, [one], keep_tokens=True)
    answer = read_answer(prepared.reader(), result.tokens, result.outcome.tail)
    summary = check_summary(answer.content, result.outcome)
    items, usage = [*history.kept, *history.given], count_usage(result.outcome)
    written = await call.compute(partial(_write, call, items, summary, usage), long=True)
    headers = timing_headers(call, len(prepared.prompt), results)
    return Reply(written, headers=headers)


def _write(
    call: Call, items: list[schema.InputItem], summary: str, usage: replies.ResponseUsage
) -> bytes:
    """Return the answer in JSON: there may be megabytes of images in it."""
    reply = replies.CompactionReply(
        id=f"resp_{call.ids.randbytes(24).hex()}",
        created_at=call.now(),
        output=list_output(call, items, summary),
        usage=usage,
    )
    return msgspec.json.encode(reply)


ROUTES = (Route("POST", "/v1/responses/compact", compact, dialect=ERRORS, images=True),)
