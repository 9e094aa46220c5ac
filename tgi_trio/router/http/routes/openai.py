"""Parameters that both OpenAI endpoints share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import invalid_value
from tgi_trio.router.http.messages.extras import TokenExtras
from tgi_trio.router.http.messages.logprobs import LogprobWriter
from tgi_trio.router.http.messages.response_format import OpenAiRequest
from tgi_trio.router.http.messages.shared_fields import read_seed
from tgi_trio.router.http.messages.usage import StreamUsage
from tgi_trio.router.parameters import GenerationParameters

# Fields of TGI's whose errors both endpoints tell, and what they are called there.
RENAMED: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "truncate": "truncate_prompt_tokens",
    "decoder_input_details": "prompt_logprobs",
    "adapter_id": "model",
}
MOST_LOGPROBS = 20  # most alternatives per token at OpenAI
_TOKEN_ID = re.compile("-?(0|[1-9][0-9]{0,18})")  # no leading zeros; the validator checks the range


def all_fields(shape: type[schema.ChatRequest | schema.CompletionRequest]) -> frozenset[str]:
    """Return the fields that a body may have, those among them that are not served."""
    return frozenset(shape.__struct_fields__) | shape.unserved.keys()


def to_parameters(call: Call, request: OpenAiRequest, **more: Any) -> GenerationParameters:
    """Return an OpenAI request's parameters for the validator; `more` overrides.

    A temperature of 0 is greedy; any other value, or none, samples. Penalties follow OpenAI's
    formula, and stop strings are cut off. The grammar comes from `answer_grammar`. Raises
    ValidationError and BodyRejected.
    """
    greedy = request.temperature == 0
    parameters: dict[str, Any] = {
        "temperature": None if greedy else request.temperature,
        "do_sample": not greedy,
        # Truncation does not change the likeliest token.
        "top_p": None if greedy else request.top_p,
        "top_k": None if greedy or request.top_k in (0, -1) else request.top_k,
        "min_p": None if greedy else request.min_p,
        "typical_p": None if greedy or request.typical_p == 1 else request.typical_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "max_new_tokens": length_limit(request),
        "min_new_tokens": request.min_tokens or 0,
        "ignore_eos": bool(request.ignore_eos),
        "no_repeat_size": request.no_repeat_ngram_size or 0,
        "no_repeat_window": request.no_repeat_ngram_window or 0,
        "no_repeat_spared": tuple(request.no_repeat_ngram_whitelist or ()),
        "stop": stops(request.stop),
        "truncate": truncation(call, request),
        "seed": read_seed(request.seed),
        "logit_bias": biases(request.logit_bias),
        "stop_regex": stops(request.stop_regex),
        "stop_ids": tuple(request.stop_token_ids or ()),
        "keep_stop": bool(request.include_stop_str_in_output or request.no_stop_trim),
        "absolute_penalties": True,
        "accept_neutral": True,
        "top_n_allowed": MOST_LOGPROBS,
    }
    return GenerationParameters(**{**parameters, **more})


def length_limit(request: OpenAiRequest) -> int | None:
    """Return the most tokens of an answer; None: as many as there is room for, -1 in a body."""
    return None if request.max_tokens == -1 else request.max_tokens


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings or expressions as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def biases(bias: dict[str, float] | None) -> dict[int, float]:
    """Return `logit_bias` with token ids as keys. Raises BodyRejected."""
    for key in bias or {}:
        if not _TOKEN_ID.fullmatch(key):
            what = f"the key `{key}` is no token id: keys are the ids of tokens as decimal numbers"
            raise invalid_value("logit_bias", what)
    return {int(key): value for key, value in (bias or {}).items()}


def alternatives(call: Call, name: str, given: int | None) -> int | None:
    """Return how many alternatives per token the field `name` asks for; -1: the vocabulary.

    Raises ValidationError.
    """
    most = max(MOST_LOGPROBS, call.engine.limits.max_top_n_tokens)
    if given == -1:
        size = call.engine.validator.vocab_size
        if size > most:
            raise ValidationError(
                f"`{name}` = -1 asks for all {size} tokens of the vocabulary, and at most {most} "
                "are shown (--max-top-n-tokens)"
            )
        return size
    if given is not None and given > most:
        raise ValidationError(f"`{name}` must be >= 0 and <= {most}. Given: {given}")
    return given


def prompt_alternatives(call: Call, request: OpenAiRequest) -> int | None:
    """Return how many alternatives per prompt token are shown; None: no log-probabilities.

    Raises ValidationError.
    """
    if request.prompt_logprobs is not None and request.stream:
        raise ValidationError("`prompt_logprobs` is not supported when streaming tokens")
    return alternatives(call, "prompt_logprobs", request.prompt_logprobs)


def truncation(call: Call, request: OpenAiRequest) -> int | None:
    """Return how many of the prompt's last tokens are kept; None: all.

    `truncate_prompt_tokens` = -1 keeps as many as leave room for the answer. Raises
    ValidationError.
    """
    given, limits = request.truncate_prompt_tokens, call.engine.limits
    if given == -1:
        room = limits.max_total_tokens - (length_limit(request) or 1)
        return max(1, min(limits.max_input_tokens, room))
    if given is not None and not 0 < given <= limits.max_input_tokens:
        raise ValidationError(
            "`truncate_prompt_tokens` must be -1 (as many as there is room for), or > 0 and <= "
            f"{limits.max_input_tokens}. Given: {given}"
        )
    return given


def choose_shown(call: Call, request: OpenAiRequest, logprobs: bool, top: int = 0) -> TokenExtras:
    """Return what the answers to a call show of their tokens."""
    names = request.return_tokens_as_token_ids is True
    return TokenExtras(
        logprobs=LogprobWriter(call.text_processor.tokenizer, as_ids=names) if logprobs else None,
        top=top,
        token_ids=request.return_token_ids is True,
        running_usage=StreamUsage.from_options(request.stream_options).running,
    )


def choices(n: int | None, most: int) -> int:
    """Return the number of answers for one prompt. Raises ValidationError."""
    count = 1 if n is None else n
    if not 1 <= count <= most:
        raise ValidationError(f"`n` must be > 0 and <= {most}. Given: {count}")
    return count
