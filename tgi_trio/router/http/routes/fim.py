"""Mistral's infilling (fill-in-the-middle): what belongs between two texts, as a chat's answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.router.http.answer_fields import fingerprint, new_id, unix_now, use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import validate_request
from tgi_trio.router.http.generation import collect_results, stream_events, take_permits
from tgi_trio.router.http.infilling import end_gaps, find_format, read_gap, write_gap
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.error_shapes import OpenAIShape
from tgi_trio.router.http.messages.events import ChatEvents, Envelope, chat_usage_event
from tgi_trio.router.http.messages.render import ending_json, text_json
from tgi_trio.router.http.messages.usage import UsageCount
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.sse import DONE

_FIM: Final = BodyReader(schema.FimRequest)


async def fill_gap(call: Call) -> Reply:
    """POST /v1/fim/completions, as a body or as a stream."""
    fim_request: schema.FimRequest = await call.read(_FIM)
    call.engine.metrics.inc("tgi_request_count")
    model = await use_model(call, fim_request.model)
    infill = find_format(call)
    parameters = openai.to_parameters(call, _as_completion(fim_request))
    gap = read_gap(fim_request.prompt, fim_request)
    prompt = await write_gap(call, infill, gap)
    take_permits(call)
    request = await validate_request(call, prompt, end_gaps(call, infill, parameters), fim_request)
    usage = UsageCount(len(request.prompt_ids))
    envelope = Envelope(new_id(call, "fim"), call.now(), model, fingerprint(call.settings))
    if fim_request.stream:
        events = [ChatEvents(envelope, 0, usage)]

        def last() -> bytes:
            return chat_usage_event(envelope, usage) + DONE

        return event_stream(call, await stream_events(call, [request], events, last), len(prompt))
    (result,) = await collect_results(call, [request], keep_tokens=False)
    usage.add(result.outcome)
    body = (
        b'{"object":"chat.completion",%b,"choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":%b},"logprobs":null,"finish_reason":%b}],"usage":%b}'
        % (
            replace(envelope, created=unix_now()).fields(),
            text_json(result.outcome.text),
            ending_json(result.outcome),
            usage.json(),
        )
    )
    return Reply(body, headers=timing_headers(call, len(prompt), [result]))


def _as_completion(fim_request: schema.FimRequest) -> schema.CompletionRequest:
    """Return the same in OpenAI's words."""
    return schema.CompletionRequest(
        fim_request.prompt,
        max_tokens=fim_request.max_tokens,
        min_tokens=fim_request.min_tokens,
        temperature=fim_request.temperature,
        top_p=fim_request.top_p,
        seed=fim_request.random_seed,
        stop=fim_request.stop,
        stream=fim_request.stream,
    )


_ERRORS = OpenAIShape(
    frozenset(schema.FimRequest.__struct_fields__),
    {
        **{"inputs": "prompt", "seed": "random_seed"},
        **{each: openai.RENAMED[each] for each in ("max_new_tokens", "min_new_tokens")},
    },
)

ROUTES = (Route("POST", "/v1/fim/completions", fill_gap, dialect=_ERRORS),)
