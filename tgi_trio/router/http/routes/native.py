"""TGI's own API: /generate, /generate_stream and POST /."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tgi_trio.errors import Draining, Overloaded, TgiTrioError, Unavailable
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import refuse_media, validate_request
from tgi_trio.router.http.generation import (
    Result,
    check_batch_size,
    collect_results,
    explain,
    stream_events,
    take_permits,
    write_results,
)
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.events import NativeEvents, QueryEvents
from tgi_trio.router.http.messages.problems import BodyRejected, Refused
from tgi_trio.router.http.messages.render import optional_json, prefill_json, text_json, tokens_json
from tgi_trio.router.http.messages.response_format import native_grammar
from tgi_trio.router.media.image_prompt import ImagePrompt, Prompt
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import Request
from tgi_trio.router.validation import fan_out

_GENERATE = BodyReader(schema.GenerateRequest)
_COMPAT = BodyReader(schema.CompatGenerateRequest)

AnyRequest = schema.GenerateRequest | schema.CompatGenerateRequest
WithParameters = AnyRequest | schema.VertexInstance | schema.InferRequest


async def generate(call: Call) -> Reply:
    """POST /generate: a text, or a list of texts for a list of queries."""
    request: schema.GenerateRequest = await call.read(_GENERATE)
    single = isinstance(request.inputs, str)
    return await _whole(
        call, read_queries(call, request), read_parameters(request), array=not single
    )


async def generate_stream(call: Call) -> Reply:
    """POST /generate_stream: an event per token."""
    request: schema.GenerateRequest = await call.read(_GENERATE)
    return await _stream(call, request, read_parameters(request))


async def compat(call: Call) -> Reply:
    """POST /: the legacy form, a list of answers or a stream."""
    request: schema.CompatGenerateRequest = await call.read(_COMPAT)
    parameters = read_parameters(request)
    if parameters.return_full_text is None:
        tag, images = call.engine.model.pipeline_tag, call.engine.images
        has_vision = images is not None and images.layout is not None
        # Vision models have another tag on the hub.
        parameters.return_full_text = tag == "text-generation" or (tag is None and not has_vision)
    if request.stream:
        return await _stream(call, request, parameters)
    return await _whole(call, read_queries(call, request), parameters, array=True)


def read_queries(call: Call, request: AnyRequest) -> list[str]:
    """Return the prompts of a request. Raises Refused for too many."""
    if isinstance(request.inputs, str):
        return [request.inputs]
    check_batch_size(call, len(request.inputs))
    return request.inputs


def find_images(call: Call, query: str) -> Prompt:
    """Return a prompt with its links to images found; unchanged for models without vision.

    Raises ValidationError for images if the model could see, but its images are not served.
    """
    layout = None if call.engine.images is None else call.engine.images.layout
    if layout is None and "image" not in call.engine.model.unserved:
        return query
    found = ImagePrompt.parse(query, ("", "") if layout is None else layout.around)
    if found is not None and layout is None:
        refuse_media(call, found.links[0])
    return query if found is None else found


def read_parameters(request: WithParameters) -> schema.GenerateParameters:
    """Return the parameters; as in TGI, sampling if there are none, greedy for `{}`."""
    return request.parameters or schema.GenerateParameters(do_sample=True)


async def to_parameters(call: Call, p: schema.GenerateParameters) -> GenerationParameters:
    """Return the parameters for the validator. Raises for an invalid grammar."""
    text_processor = call.text_processor
    if p.grammar is not None and p.adapter_id is not None:  # a tag may be one of its own tokens
        text_processor = await call.engine.text_processors.find(
            call.engine.adapters.find(p.adapter_id)
        )
    return GenerationParameters(
        best_of=p.best_of,
        temperature=p.temperature,
        repetition_penalty=p.repetition_penalty,
        frequency_penalty=p.frequency_penalty,
        top_k=p.top_k,
        top_p=p.top_p,
        typical_p=p.typical_p,
        do_sample=p.do_sample,
        max_new_tokens=p.max_new_tokens,
        min_new_tokens=p.min_new_tokens or 0,
        no_repeat_size=p.no_repeat_ngram_size or 0,
        no_repeat_window=p.no_repeat_ngram_window or 0,
        no_repeat_spared=tuple(p.no_repeat_ngram_whitelist or ()),
        stop=tuple(p.stop),
        truncate=p.truncate,
        watermark=p.watermark,
        seed=p.seed,
        top_n_tokens=p.top_n_tokens,
        decoder_input_details=p.decoder_input_details,
        grammar=await native_grammar(
            p.grammar, call.engine.limits.max_grammar_bytes, text_processor.tokenizer.added_tokens
        ),
        adapter_id=p.adapter_id,
    )


async def generate_all(
    call: Call, queries: Sequence[str], parameters: schema.GenerateParameters, keep: bool = False
) -> list[list[Result]]:
    """Return each query's generations: the best, then the others of `best_of`, in order.

    `keep`: keep their tokens. Raises ValidationError, Overloaded, and what generation raises.
    """
    sampling = await to_parameters(call, parameters)
    call.engine.validator.check_endpoint(sampling, streaming=False)
    count = max(sampling.best_of or 1, 1)
    take_permits(call, len(queries), count)
    requests: list[Request] = []
    for query in queries:
        one = await validate_request(call, find_images(call, query), sampling, parameters)
        requests += [one] if count == 1 else fan_out(one, count)
    results = await collect_results(call, requests, keep_tokens=keep or count > 1)
    groups: list[list[Result]] = []
    for start in range(0, len(results), count):
        group = results[start : start + count]
        best = max(group, key=Result.mean_logprob)
        groups.append([best, *(each for each in group if each is not best)])
    return groups


async def _whole(
    call: Call, queries: list[str], parameters: schema.GenerateParameters, array: bool
) -> Reply:
    call.engine.metrics.inc("tgi_request_count")
    details = parameters.details or parameters.decoder_input_details
    characters = sum(map(call.cut.count, queries))
    prefixes = _prefixes(call, queries, parameters)
    groups = await generate_all(call, queries, parameters, keep=details)

    def write() -> bytes:
        answers: list[bytes] = []
        for prefix, (best, *losers) in zip(prefixes, groups, strict=True):
            answer = b'{"generated_text":%b' % text_json(prefix + best.outcome.text)
            if details:
                answer += b',"details":%b' % _details(call, best, losers, prefix)
            answers.append(answer + b"}")
        return b"[%b]" % b",".join(answers) if array else answers[0]

    headers = timing_headers(call, characters, [best for best, *_ in groups])
    body = await write_results(call, [each for group in groups for each in group], write)
    return Reply(body, headers=headers)


def _prefixes(call: Call, queries: list[str], parameters: schema.GenerateParameters) -> list[str]:
    """Return what precedes the text of each query's answer."""
    if not parameters.return_full_text:
        return [""] * len(queries)
    return [call.cut.write_out(query) for query in queries]


async def _stream(call: Call, request: AnyRequest, parameters: schema.GenerateParameters) -> Reply:
    """Return the stream; as in TGI, status 200 and an error event if it cannot begin.

    Raises Draining, as proxies try another server only after an error status, and BodyRejected for
    a grammar of the wrong form, which TGI reads with the body.
    """
    call.engine.metrics.inc("tgi_request_count")
    queries = read_queries(call, request)
    characters = sum(map(call.cut.count, queries))
    prefixes = _prefixes(call, queries, parameters)
    events: list[NativeEvents]
    if isinstance(request.inputs, str):
        events = [NativeEvents(prefixes[0], parameters.details)]
    else:
        index = itertools.count(1)
        events = [
            QueryEvents(prefix, parameters.details, i, index) for i, prefix in enumerate(prefixes)
        ]
    try:
        sampling = await to_parameters(call, parameters)
        call.engine.validator.check_endpoint(sampling, streaming=True)
        take_permits(call, len(queries))
        requests = [
            await validate_request(call, find_images(call, query), sampling, parameters)
            for query in queries
        ]
        body = await stream_events(call, requests, events)
    except (Draining, BodyRejected):
        raise
    except TgiTrioError as error:
        if call.front is not None and isinstance(error, (Overloaded, Unavailable, Refused)):
            raise  # the front tries another replica
        return event_stream(call, explain(call, error).native_event(), characters)
    return event_stream(call, body, characters)


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
        texts = [call.text_processor.tokenizer.token_text(id) for id in ids]
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
    Route("POST", "/", compat, images=True),
    Route("POST", "/generate", generate, images=True),
    Route("POST", "/generate_stream", generate_stream, images=True),
)
