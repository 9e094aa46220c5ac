"""llama.cpp's infilling: what belongs between two texts, for editors that speak to its server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import trio

from tgi_trio.errors import PromptTooLong, ValidationError, name_param
from tgi_trio.router.http.answer_fields import new_id, use_model
from tgi_trio.router.http.answer_headers import event_stream, timing_headers
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import validate_request
from tgi_trio.router.http.dialects.llama_cpp.answer import InfillAnswer, InfillEvents
from tgi_trio.router.http.dialects.llama_cpp.sampling import Drawing, read_drawing
from tgi_trio.router.http.dialects.llama_cpp.schema import InfillRequest
from tgi_trio.router.http.gap_fitting import fit_gap
from tgi_trio.router.http.generation import collect_results, stream_events, take_permits
from tgi_trio.router.http.infilling import (
    count_plainly,
    end_gaps,
    find_format,
    read_others,
    write_gap,
)
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.error_shapes import OpenAIShape
from tgi_trio.router.http.messages.shared_fields import read_seed
from tgi_trio.router.http.routes import openai
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import LineLimits, Outcome, Request, Timings
from tgi_trio.router.telemetry.request_stats import RequestStats
from tgi_trio.router.text.infill import Gap, InfillFormat

_INFILL: Final = BodyReader(InfillRequest)
_STOPS: Final = 16  # stop strings: llama.cpp has no limit
_SHARE: Final = 8  # of all tokens: what is left for an answer of any length


async def fill_gap(call: Call) -> Reply:
    """POST /infill, as a body or as a stream."""
    infill_request: InfillRequest = await call.read(_INFILL)
    call.engine.metrics.inc("tgi_request_count")
    model = await use_model(call, infill_request.model)
    infill = find_format(call, "input_suffix")
    drawing = read_drawing(infill_request)
    parameters = _parameters(call, infill_request, drawing, infill)
    take_permits(call)
    if infill_request.cache_prompt is False and infill_request.cache_salt is None:
        infill_request.cache_salt = new_id(call, "infill")  # shared with no other request
    gap = Gap(
        infill_request.input_prefix + (infill_request.prompt or ""),
        infill_request.input_suffix,
        read_others(infill_request.input_extra or ()),
    )
    request, prompt, truncated = await _validate(call, infill_request, infill, gap, parameters)
    if drawing.greedy:
        request = replace(request, sampling=replace(request.sampling, sample=False))
    answer = InfillAnswer(
        model,
        prompt,
        len(request.prompt_ids),
        _show_settings(infill_request, drawing, request),
        infill_request.response_fields or (),
        truncated,
        wanted=infill_request.n_predict != 0,
    )
    if infill_request.stream:
        events = [InfillEvents(answer, new_id(call, "infill"), lambda end: _stats(call, end))]
        return event_stream(call, await stream_events(call, [request], events), len(prompt))
    keep = infill_request.return_tokens is True and answer.wanted
    (result,) = await collect_results(call, [request], keep_tokens=keep)
    text = result.outcome.text if answer.wanted else ""
    ids = [token.id for token in result.tokens]
    body = answer.write(result.outcome, result.request_stats, text, ids)
    return Reply(body, headers=timing_headers(call, len(prompt), [result]))


def _parameters(
    call: Call, infill_request: InfillRequest, drawing: Drawing, infill: InfillFormat
) -> GenerationParameters:
    """Return the parameters for the validator. Raises ValidationError."""
    if drawing.judged and not call.engine.validator.reads_tokens:
        text = "the sampler `infill` is not served with --disable-grammar-support: leave it out"
        raise name_param(ValidationError(text), "samplers")
    wanted = infill_request.n_predict if infill_request.n_predict is not None else -1
    most = max(1, call.engine.limits.max_total_tokens // 2)  # the rest is for what is around
    limit = infill_request.t_max_predict_ms or 0
    lines = LineLimits(infill_request.n_indent or 0, limit / 1e3 if limit > 0 else None)
    parameters = GenerationParameters(
        **drawing.parameters,
        do_sample=True,
        max_new_tokens=None if wanted < 0 else min(max(wanted, 1), most),
        stop=openai.stops(infill_request.stop),
        seed=read_seed(infill_request.seed),
        lines=lines if lines != LineLimits() else None,
        keep_stop=False,
        absolute_penalties=True,
        accept_neutral=True,
        stops_allowed=_STOPS,
    )
    parameters = end_gaps(call, infill, parameters)
    return replace(parameters, gap_ends=parameters.stop_ids) if drawing.judged else parameters


async def _validate(
    call: Call,
    infill_request: InfillRequest,
    infill: InfillFormat,
    gap: Gap,
    parameters: GenerationParameters,
) -> tuple[Request, str, bool]:
    """Return the request, its prompt, and whether something has been left out of that.

    Raises ValidationError.
    """
    added, limits = call.text_processor.tokenizer.added_tokens, call.engine.limits
    try:
        prompt = await write_gap(call, infill, gap, as_file=True)
        request = await validate_request(call, prompt, parameters, infill_request)
        return request, infill.write(gap, added), False
    except PromptTooLong:
        answer = parameters.max_new_tokens or max(1, limits.max_total_tokens // _SHARE)
        most = min(limits.max_input_tokens, limits.max_total_tokens - answer)
        count = await count_plainly(call, infill, gap)
        fitted = await fit_gap(gap, infill, frozenset(added), most, count)
    prompt = await write_gap(call, infill, fitted, as_file=True)
    request = await validate_request(call, prompt, parameters, infill_request)
    return request, infill.write(fitted, added), True


def _show_settings(
    infill_request: InfillRequest, drawing: Drawing, request: Request
) -> dict[str, Any]:
    """Return `generation_settings`: what applies, in llama.cpp's names."""
    sampling, stopping = request.sampling, request.stopping
    return {
        "seed": sampling.seed,
        "temperature": 0.0 if drawing.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(stopping.stop),
        "n_predict": -1 if infill_request.n_predict is None else infill_request.n_predict,
        "n_indent": infill_request.n_indent or 0,
        "t_max_predict_ms": infill_request.t_max_predict_ms or 0,
        "stream": infill_request.stream is True,
    }


def _stats(call: Call, outcome: Outcome) -> RequestStats:
    """Return the statistics of a stream that ends now."""
    timings = call.generations[-1] if call.generations else Timings(received=call.received)
    return RequestStats.of(timings, outcome, trio.current_time())


_ERRORS = OpenAIShape(
    frozenset(InfillRequest.__struct_fields__) | InfillRequest.unserved.keys(),
    {"max_new_tokens": "n_predict", "inputs": "input_prefix", "adapter_id": "model"},
)

ROUTES = (Route("POST", "/infill", fill_gap, dialect=_ERRORS),)
