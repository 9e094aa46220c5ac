"""OpenAI's (legacy) completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tgi_trio.router.http import schema
from tgi_trio.router.http.errors import Refused
from tgi_trio.router.http.events import (
    CompletionEvents,
    Envelope,
    UsageCount,
    completion_usage_event,
)
from tgi_trio.router.http.exchange import Call, Reply, Route
from tgi_trio.router.http.generation import (
    Result,
    admit,
    check_batch_size,
    event_stream,
    fingerprint,
    gather,
    pour,
    resolve_model,
    timing_headers,
    unix_now,
)
from tgi_trio.router.http.render import OPENAI_REASONS, completion_logprobs_json, text_json
from tgi_trio.router.http.routes import openai
from tgi_trio.router.http.sse import DONE
from tgi_trio.router.http.urgency import validated
from tgi_trio.router.request import FinishReason, Request, StoppingCriteria, Token
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.validation import spread

_COMPLETION = schema.BodyReader(schema.CompletionRequest)

Prompt = str | list[int]


async def completions(call: Call) -> Reply:
    """POST /v1/completions, as a body or as a stream, for one prompt or several."""
    request: schema.CompletionRequest = _COMPLETION.read(call.headers, call.body)
    call.engine.metrics.inc("tgi_request_count")
    if request.suffix is not None:
        text = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise Refused(422, text, "suffix not supported")
    prompts = _prompts(call, request)
    resolve_model(call, request.model)
    count = openai.choices(request.n, call.engine.limits.max_concurrent_requests)
    candidates = _candidates(request, count)
    unwritten = _writes_nothing(request)
    read_prompts = bool(request.echo) and request.logprobs is not None and not request.stream
    more = {"max_new_tokens": 1} if unwritten else {}
    parameters = openai.wanted(
        request,
        top_n_tokens=request.logprobs,
        decoder_input_details=read_prompts,
        prompt_top_n=(request.logprobs or 0) if read_prompts else 0,
        **more,
    )
    admit(call, _generations(call, len(prompts), candidates))
    requests: list[Request] = []
    for prompt in prompts:
        one = await validated(call, prompt, parameters, request)
        requests += [one] if candidates == 1 else spread(one, candidates)

    echoes = _echoes(call, request, prompts)
    characters = sum(map(len, _texts(call, prompts)))
    # TGI does not echo the name in completions, and dates them by their beginning.
    envelope = Envelope(unix_now(), call.engine.model.id, fingerprint(call.settings))
    if request.stream:
        # One generation in `count` counts the prompt.
        usage = UsageCount(sum(len(each.prompt_ids) for each in requests[::count]))
        events = [
            CompletionEvents(envelope, i, request.logprobs, echoes[i // count], usage)
            for i in range(len(requests))
        ]
        options = request.stream_options
        include_usage = options is not None and options.include_usage

        def last() -> bytes:
            return (completion_usage_event(envelope, usage) if include_usage else b"") + DONE

        return event_stream(call, pour(call, requests, events, last), characters)

    keep = request.logprobs is not None or candidates > count
    results = await gather(call, requests, keep_tokens=keep)
    if unwritten:
        results = [_forget(result) for result in results]
    best = _best(results, candidates, count)
    body = _body(call, request, envelope, best, results, echoes)
    headers = timing_headers(call, characters, results, compute_time=False)
    return Reply(body, headers=headers)


def _prompts(call: Call, request: schema.CompletionRequest) -> list[Prompt]:
    """Return the prompts, each as text or as token ids; raises BodyRejected and Refused."""
    given = request.prompt
    if given == []:
        raise schema.invalid(
            "prompt", "Empty array detected. Do not use an empty array for the prompt."
        )
    prompts: list[Prompt]
    if isinstance(given, str):
        prompts = [given]
    elif all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    else:
        prompts = [item for item in given if not isinstance(item, int)]
        if len({type(item) for item in given}) > 1:
            raise schema.invalid("prompt", "texts and token ids cannot be mixed")
    check_batch_size(call, len(prompts))
    return prompts


def _candidates(request: schema.CompletionRequest, count: int) -> int:
    """Return how many generations each prompt gets, of which the best `count` are returned."""
    best_of = count if request.best_of is None else request.best_of
    if best_of < count:
        problem = f"`best_of` must be >= `n`. Given: {best_of} and {count}"
    elif best_of > count and request.stream:
        problem = "`best_of` != `n` is not supported when streaming tokens"
    else:
        return best_of
    raise Refused(422, f"Input validation error: {problem}", "validation")


def _generations(call: Call, prompts: int, candidates: int) -> int:
    """Return how many generations a call makes; raises Refused for more than can ever run at once.

    Without that it would be told to come back later, for ever.
    """
    most, total = call.engine.limits.max_concurrent_requests, prompts * candidates
    if total > most:
        text = (
            f"Input validation error: {prompts} prompts with {candidates} generations each are "
            f"{total}; at most {most} can run at once (--max-concurrent-requests)"
        )
        raise Refused(422, text, "validation")
    return total


def _writes_nothing(request: schema.CompletionRequest) -> bool:
    """Return whether the prompt alone is asked for: evaluation tools read its log-probabilities.

    Raises Refused.
    """
    if request.max_tokens != 0 or not request.echo:
        return False
    if request.stream:
        text = "Input validation error: `max_tokens` = 0 is not supported when streaming tokens"
        raise Refused(422, text, "validation")
    return True


def _forget(result: Result) -> Result:
    """Return a result without what was generated: the end of a prefill always brings a token."""
    nothing = replace(
        result.outcome, text="", tail="", generated_tokens=0, reason=FinishReason.LENGTH
    )
    return replace(result, outcome=nothing, tokens=[])


def _texts(call: Call, prompts: Sequence[Prompt]) -> list[str]:
    decode = call.engine.tokenizer.decode
    return [each if isinstance(each, str) else decode(each) for each in prompts]


def _echoes(call: Call, request: schema.CompletionRequest, prompts: Sequence[Prompt]) -> list[str]:
    return _texts(call, prompts) if request.echo else [""] * len(prompts)


def _best(results: list[Result], candidates: int, count: int) -> list[Result]:
    """Return the best `count` of every prompt's `candidates`, prompts in order."""
    if candidates == count:
        return results
    best: list[Result] = []
    for start in range(0, len(results), candidates):
        group = results[start : start + candidates]
        best += sorted(group, key=Result.mean_logprob, reverse=True)[:count]
    return best


def _body(
    call: Call,
    request: schema.CompletionRequest,
    envelope: Envelope,
    best: list[Result],
    results: list[Result],
    echoes: list[str],
) -> bytes:
    count = len(best) // len(echoes)
    choices = []
    for i, result in enumerate(best):
        echo = echoes[i // count]
        choices.append(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (
                i,
                text_json(echo + result.outcome.text),
                _logprobs(call, request, result),
                OPENAI_REASONS[result.outcome.reason],
            )
        )
    usage = UsageCount(
        prompt_tokens=sum(result.outcome.prompt_tokens for result in best[::count]),
        completion_tokens=sum(result.outcome.generated_tokens for result in results),
    )
    return b'{"object":"text_completion","id":"",%b,"choices":[%b],"usage":%b}' % (
        envelope.fields(),
        b",".join(choices),
        usage.json(),
    )


def _logprobs(call: Call, request: schema.CompletionRequest, result: Result) -> bytes:
    """Return the logprobs object; an echoed prompt has its tokens in it, too."""
    if request.logprobs is None:
        return b"null"
    return completion_logprobs_json(_prompt_tokens(call, result) + result.tokens, request.logprobs)


def _prompt_tokens(call: Call, result: Result) -> list[Token]:
    """Return the tokens of a prompt whose log-probabilities were asked for, else nothing."""
    text = OutputText(call.engine.tokenizer, [], StoppingCriteria(max_new_tokens=1))
    outcome = result.outcome
    tops = outcome.prompt_tops or ((),) * len(outcome.prompt_logprobs)
    ids = result.request.prompt_ids.tolist()
    return [text.push(*token) for token in zip(ids, outcome.prompt_logprobs, tops, strict=False)]


ROUTES = (Route("POST", "/v1/completions", completions, openai=True),)
