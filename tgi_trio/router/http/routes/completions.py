"""OpenAI's (legacy) completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import GrammarError, ValidationError, name_param, naming_param
from tgi_trio.router.http.answer_fields import fingerprint, new_id, use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import validate_request
from tgi_trio.router.http.generation import (
    Result,
    check_batch_size,
    collect_results,
    stream_events,
    take_permits,
    write_results,
)
from tgi_trio.router.http.infilling import end_gaps, find_format, write_gaps
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader, invalid_value
from tgi_trio.router.http.messages.error_shapes import OpenAIShape
from tgi_trio.router.http.messages.events import CompletionEvents, Envelope, completion_usage_event
from tgi_trio.router.http.messages.extras import TokenExtras, prompt_ids_json, token_ids_json
from tgi_trio.router.http.messages.logprobs import prompt_logprobs_json, prompt_tokens
from tgi_trio.router.http.messages.render import ending_json, text_json
from tgi_trio.router.http.messages.response_format import answer_grammar, forms
from tgi_trio.router.http.messages.usage import StreamUsage, UsageCount
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.routes.tokens import text_of
from tgi_trio.router.http.sse import DONE
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import FinishReason, Request
from tgi_trio.router.text.token_ids import PIECE, drain_ids
from tgi_trio.router.validation import fan_out

_COMPLETION = BodyReader(schema.CompletionRequest)

Prompt = str | Sequence[int] | NDArray[np.int32]


async def completions(call: Call) -> Reply:
    """POST /v1/completions, as a body or as a stream, for one or several prompts."""
    request: schema.CompletionRequest = await call.read(_COMPLETION)
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, request.model)
    infill = None if request.suffix is None else find_format(call)
    if infill is None and request.input_extra is not None:
        text = "`input_extra` is written around a gap, and needs a `suffix`"
        raise name_param(ValidationError(text), "input_extra")
    prompts = await call.compute(partial(_prompts, call, request))
    count = openai.choices(request.n, call.engine.limits.max_concurrent_requests)
    candidates = _candidates(call, request, count)
    unwritten = _writes_nothing(request)
    parameters = await _parameters(call, request, unwritten)
    if infill is not None:
        prompts = [*await write_gaps(call, infill, request, prompts)]
        parameters = end_gaps(call, infill, parameters)
    take_permits(call, len(prompts), candidates)
    requests: list[Request] = []
    for prompt in prompts:
        with naming_param(next(iter(forms(request)), None), GrammarError):
            one = await validate_request(call, prompt, parameters, request)
        requests += [one] if candidates == 1 else fan_out(one, candidates)

    texts = await _texts(call, request, prompts, requests[::candidates])
    echoes = texts if request.echo else [""] * len(prompts)
    characters = sum(map(len, texts))
    top = parameters.top_n_tokens
    shown = openai.choose_shown(call, request, logprobs=top is not None, top=top or 0)
    usages = [UsageCount(len(each.prompt_ids)) for each in requests[::candidates]]
    # As in TGI, completions have the model's own name and the time of their beginning.
    model = call.engine.model.id
    envelope = Envelope(new_id(call, "cmpl"), call.now(), model, fingerprint(call.settings))
    if request.stream:
        events = _events(envelope, requests, usages, echoes, shown)
        include_usage = StreamUsage.from_options(request.stream_options).last

        def last() -> bytes:
            whole = UsageCount.total(usages)
            return (completion_usage_event(envelope, whole) if include_usage else b"") + DONE

        return event_stream(call, await stream_events(call, requests, events, last), characters)

    keep = shown.logprobs is not None or shown.token_ids or candidates > count
    results = await collect_results(call, requests, keep_tokens=keep)
    if unwritten:
        results = [_forget(result) for result in results]
    for i, result in enumerate(results):
        usages[i // candidates].add(result.outcome)
    best, whole = _best(results, candidates, count), UsageCount.total(usages)
    write = partial(_completion, call, request, envelope, best, echoes, shown, whole)
    body = await write_results(call, best, write)
    return Reply(body, headers=timing_headers(call, characters, results, compute_time=False))


async def _parameters(
    call: Call, request: schema.CompletionRequest, unwritten: bool
) -> GenerationParameters:
    """Return the parameters of each generation. Raises ValidationError and BodyRejected."""
    top = openai.alternatives(call, "logprobs", request.logprobs)
    of_prompt = openai.prompt_alternatives(call, request)
    echoed = top if request.echo and not request.stream else None
    more = {"max_new_tokens": 1} if unwritten else {}
    return openai.to_parameters(
        call,
        request,
        top_n_tokens=top,
        decoder_input_details=echoed is not None or of_prompt is not None,
        prompt_top_n=max(echoed or 0, of_prompt or 0),
        grammar=await answer_grammar(
            request,
            call.engine.limits.max_grammar_bytes,
            call.text_processor.tokenizer.added_tokens,
        ),
        **more,
    )


def _events(
    envelope: Envelope,
    requests: Sequence[Request],
    usages: Sequence[UsageCount],
    echoes: Sequence[str],
    shown: TokenExtras,
) -> list[CompletionEvents]:
    """Return what renders each generation; the same number of them share a prompt."""
    count = len(requests) // len(usages)
    return [
        CompletionEvents(
            envelope, i, usages[i // count], echoes[i // count], shown, shown.extras(each)
        )
        for i, each in enumerate(requests)
    ]


def _prompts(call: Call, request: schema.CompletionRequest) -> list[Prompt]:
    """Return the prompts, each as text or as token ids. Raises BodyRejected and Refused."""
    given = request.prompt
    if given == []:
        raise invalid_value(
            "prompt", "Empty array detected. Do not use an empty array for the prompt."
        )
    prompts: list[Prompt]
    if isinstance(given, str):
        prompts = [given]
    else:
        kinds = {type(each) for each in given}  # there may be a million
        if len(kinds) > 1:
            raise invalid_value("prompt", "texts and token ids cannot be mixed")
        whole = cast("list[str | list[int]]", [given] if kinds == {int} else given)
        prompts = [each if isinstance(each, str) else _take_ids(each) for each in whole]
    check_batch_size(call, len(prompts))
    return prompts


def _take_ids(given: list[int]) -> Prompt:
    """Return the ids of a prompt; many as an array, which leaves the body without them."""
    return given if len(given) <= PIECE else drain_ids(given)


def _candidates(call: Call, request: schema.CompletionRequest, count: int) -> int:
    """Return the number of generations for each prompt; the best `count` of them are returned.

    Raises ValidationError.
    """
    best_of = count if request.best_of is None else request.best_of
    if best_of < count:
        raise ValidationError(f"`best_of` must be >= `n`. Given: {best_of} and {count}")
    if best_of > count:
        if request.stream:
            raise ValidationError("`best_of` != `n` is not supported when streaming tokens")
        chosen = GenerationParameters(best_of=best_of)
        call.engine.validator.check_endpoint(chosen, streaming=False)
    return best_of


def _writes_nothing(request: schema.CompletionRequest) -> bool:
    """Return whether only the prompt is wanted: evaluation tools read its log-probabilities.

    Raises ValidationError.
    """
    if request.max_tokens != 0 or not request.echo:
        return False
    if request.stream:
        raise ValidationError("`max_tokens` = 0 is not supported when streaming tokens")
    return True


def _forget(result: Result) -> Result:
    """Return a result without its generated token: the end of a prefill always generates one."""
    nothing = replace(
        result.outcome, text="", tail="", generated_tokens=0, reason=FinishReason.LENGTH
    )
    return replace(result, outcome=nothing, tokens=[])


async def _texts(
    call: Call,
    request: schema.CompletionRequest,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
) -> list[str]:
    """Return the prompts as text, without what `truncate_prompt_tokens` cut off."""
    whole = request.truncate_prompt_tokens is None
    return [
        prompt if whole and isinstance(prompt, str) else await text_of(call, one.prompt_ids)
        for prompt, one in zip(prompts, requests, strict=True)
    ]


def _best(results: list[Result], candidates: int, count: int) -> list[Result]:
    """Return the best `count` of every prompt's `candidates`, in the order of prompts."""
    if candidates == count:
        return results
    best: list[Result] = []
    for start in range(0, len(results), candidates):
        group = results[start : start + candidates]
        best += sorted(group, key=Result.mean_logprob, reverse=True)[:count]
    return best


def _completion(
    call: Call,
    request: schema.CompletionRequest,
    envelope: Envelope,
    results: Sequence[Result],
    echoes: Sequence[str],
    shown: TokenExtras,
    usage: UsageCount,
) -> bytes:
    """Return the body; the same number of results share an echo."""
    count = len(results) // len(echoes)
    choices = [
        _choice(call, request, i, echoes[i // count], result, shown)
        for i, result in enumerate(results)
    ]
    return b'{"object":"text_completion",%b,"choices":[%b],"usage":%b}' % (
        envelope.fields(),
        b",".join(choices),
        usage.json(),
    )


def _choice(
    call: Call,
    request: schema.CompletionRequest,
    index: int,
    echo: str,
    result: Result,
    shown: TokenExtras,
) -> bytes:
    """Return one completion; with an echo, its logprobs include those of the prompt."""
    outcome = result.outcome
    of_prompt = prompt_tokens(call.text_processor.tokenizer, result.request, outcome)
    logprobs, extras = b"null", b""
    if shown.logprobs is not None:
        echoed = of_prompt if request.echo else []
        before = echo, echoed
        logprobs = shown.logprobs.completion(result.tokens, shown.top, len(echo), before)
    if shown.token_ids:
        extras += prompt_ids_json(result.request) + token_ids_json(result.tokens)
    top = openai.prompt_alternatives(call, request)
    if top is not None:
        extras += b',"prompt_logprobs":%b' % prompt_logprobs_json(of_prompt, top)
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
        index,
        text_json(echo + outcome.text),
        logprobs,
        ending_json(outcome),
        extras,
    )


_ERRORS = OpenAIShape(
    openai.all_fields(schema.CompletionRequest),
    {**openai.RENAMED, "inputs": "prompt", "top_n_tokens": "logprobs"},
)

ROUTES = (Route("POST", "/v1/completions", completions, dialect=_ERRORS),)
