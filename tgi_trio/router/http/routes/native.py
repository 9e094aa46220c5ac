"""TGI's own API: /generate, /generate_stream and POST /."""

from __future__ import annotations

from msgspec import UNSET

from tgi_trio.errors import TgiTrioError, ValidationError
from tgi_trio.router.http import schema
from tgi_trio.router.http.events import NativeEvents
from tgi_trio.router.http.exchange import Call, Reply, Route
from tgi_trio.router.http.generation import (
    Result,
    admit,
    event_stream,
    explain,
    gather,
    pour,
    timing_headers,
)
from tgi_trio.router.http.render import optional_json, prefill_json, text_json, tokens_json
from tgi_trio.router.http.urgency import validated
from tgi_trio.router.validation import GenerateParameters, spread

_GENERATE = schema.BodyReader(schema.GenerateRequest)
_COMPAT = schema.BodyReader(schema.CompatGenerateRequest)

AnyRequest = schema.GenerateRequest | schema.CompatGenerateRequest


async def generate(call: Call) -> Reply:
    """POST /generate: the text in one piece."""
    request: schema.GenerateRequest = _GENERATE.read(call.headers, call.body)
    return await _whole(call, request.inputs, parameters_of(request), array=False)


async def generate_stream(call: Call) -> Reply:
    """POST /generate_stream: an event per token."""
    request: schema.GenerateRequest = _GENERATE.read(call.headers, call.body)
    return await _stream(call, request.inputs, parameters_of(request))


async def compat(call: Call) -> Reply:
    """POST /: the legacy shape, a list of one answer or a stream."""
    request: schema.CompatGenerateRequest = _COMPAT.read(call.headers, call.body)
    parameters = parameters_of(request)
    if parameters.return_full_text is None:
        tag = call.engine.model.pipeline_tag
        parameters.return_full_text = tag in (None, "text-generation")
    if request.stream:
        return await _stream(call, request.inputs, parameters)
    return await _whole(call, request.inputs, parameters, array=True)


def parameters_of(request: AnyRequest) -> schema.GenerateParameters:
    """Return the parameters; TGI samples when there are none, and is greedy for `{}`."""
    if request.parameters is UNSET:
        return schema.GenerateParameters(do_sample=True)
    return request.parameters


def wanted(p: schema.GenerateParameters) -> GenerateParameters:
    """Return the parameters as the validator reads them; raises ValidationError."""
    if p.grammar is not None:
        raise ValidationError("grammar is not supported yet")
    return GenerateParameters(
        best_of=p.best_of,
        temperature=p.temperature,
        repetition_penalty=p.repetition_penalty,
        frequency_penalty=p.frequency_penalty,
        top_k=p.top_k,
        top_p=p.top_p,
        typical_p=p.typical_p,
        do_sample=p.do_sample,
        max_new_tokens=p.max_new_tokens,
        stop=tuple(p.stop),
        truncate=p.truncate,
        watermark=p.watermark,
        seed=p.seed,
        top_n_tokens=p.top_n_tokens,
        decoder_input_details=p.decoder_input_details,
        adapter_id=p.adapter_id,
    )


async def _whole(
    call: Call, inputs: str, parameters: schema.GenerateParameters, array: bool
) -> Reply:
    call.engine.metrics.inc("tgi_request_count")
    asked = wanted(parameters)
    validator = call.engine.validator
    validator.check_endpoint(asked, streaming=False)
    count = max(asked.best_of or 1, 1)
    admit(call, count)
    request = await validated(call, inputs, asked, parameters)
    requests = [request] if count == 1 else spread(request, count)
    details = parameters.details or parameters.decoder_input_details
    results = await gather(call, requests, keep_tokens=details or count > 1)
    best = max(results, key=Result.mean_logprob) if count > 1 else results[0]
    losers = [result for result in results if result is not best]

    prefix = inputs if parameters.return_full_text else ""
    body = b'{"generated_text":%b' % text_json(prefix + best.outcome.text)
    if details:
        body += b',"details":%b' % _details(call, best, losers, prefix)
    body += b"}"
    headers = timing_headers(call, len(inputs), [best])
    return Reply(b"[%b]" % body if array else body, headers=headers)


async def _stream(call: Call, inputs: str, parameters: schema.GenerateParameters) -> Reply:
    """Return the stream; like TGI, with status 200 and an error event when it cannot begin."""
    call.engine.metrics.inc("tgi_request_count")
    prefix = inputs if parameters.return_full_text else ""
    try:
        asked = wanted(parameters)
        call.engine.validator.check_endpoint(asked, streaming=True)
        admit(call)
        request = await validated(call, inputs, asked, parameters)
        body = pour(call, [request], [NativeEvents(prefix, parameters.details)])
    except TgiTrioError as error:
        return event_stream(call, explain(call, error).native_event(), len(inputs))
    return event_stream(call, body, len(inputs))


def _details(call: Call, best: Result, losers: list[Result], prefix: str) -> bytes:
    """Return Details: the best sequence, and the others as `best_of_sequences`."""
    others = b""
    if losers:
        sequences = b",".join(
            b'{"generated_text":%b,%b%b}'
            % (text_json(prefix + loser.outcome.text), _sequence(call, loser), _tops(loser))
            for loser in losers
        )
        others = b',"best_of_sequences":[%b]' % sequences
    return b"{%b%b%b}" % (_sequence(call, best), others, _tops(best))


def _sequence(call: Call, result: Result) -> bytes:
    outcome = result.outcome
    prefill = b"[]"
    if outcome.prompt_logprobs:
        ids = result.request.prompt_ids.tolist()
        texts = [call.engine.tokenizer.token_text(id) for id in ids]
        prefill = prefill_json(ids, texts, outcome.prompt_logprobs)
    tokens = result.tokens
    if outcome.tail and tokens:
        tokens[-1].text += outcome.tail  # as the stream shows it
    return b'"finish_reason":"%b","generated_tokens":%d,"seed":%b,"prefill":%b,"tokens":%b' % (
        outcome.reason.value.encode(),
        outcome.generated_tokens,
        optional_json(outcome.seed),
        prefill,
        tokens_json(tokens),
    )


def _tops(result: Result) -> bytes:
    if not any(token.top for token in result.tokens):
        return b""
    return b',"top_tokens":[%b]' % b",".join(tokens_json(token.top) for token in result.tokens)


ROUTES = (
    Route("POST", "/", compat),
    Route("POST", "/generate", generate),
    Route("POST", "/generate_stream", generate_stream),
)
