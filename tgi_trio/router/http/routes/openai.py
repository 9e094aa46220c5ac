"""What both OpenAI endpoints do with their parameters."""

from __future__ import annotations

from typing import Any

from tgi_trio.router.http import schema
from tgi_trio.router.http.errors import Refused
from tgi_trio.router.http.response_format import response_grammar
from tgi_trio.router.validation import GenerateParameters

MOST_LOGPROBS = 20  # alternatives per token that OpenAI allows

Request = schema.ChatRequest | schema.CompletionRequest


def wanted(request: Request, **more: Any) -> GenerateParameters:
    """Return an OpenAI request's parameters as the validator reads them; `more` overrides.

    A temperature of 0 is greedy; anything else, given or not, samples. Penalties follow OpenAI's
    formula, and the text of a stop string is dropped.
    """
    greedy = request.temperature == 0
    parameters: dict[str, Any] = {
        "temperature": None if greedy else request.temperature,
        "do_sample": not greedy,
        # The likeliest token is the likeliest of any number of them: nothing left to restrict.
        "top_p": None if greedy else request.top_p,
        "top_k": None if greedy or request.top_k in (0, -1) else request.top_k,
        "min_p": None if greedy else request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "max_new_tokens": request.max_tokens,
        "min_new_tokens": request.min_tokens or 0,
        "ignore_eos": bool(request.ignore_eos),
        "stop": stops(request.stop),
        "seed": request.seed,
        "logit_bias": biases(request.logit_bias),
        "grammar": response_grammar(request.response_format),
        "keep_stop": False,
        "absolute_penalties": True,
        "accept_top_p_one": True,
        "top_n_allowed": MOST_LOGPROBS,
    }
    return GenerateParameters(**{**parameters, **more})


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return stop strings, given one, several or none."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def biases(bias: dict[str, float] | None) -> dict[int, float]:
    """Return `logit_bias` with its keys as token ids; raises BodyRejected."""
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise schema.invalid("logit_bias", "keys must be token ids") from error


def choices(n: int | None, most: int) -> int:
    """Return how many answers are wanted for one prompt; raises Refused (422)."""
    count = 1 if n is None else n
    if not 1 <= count <= most:
        text = f"Input validation error: `n` must be > 0 and <= {most}. Given: {count}"
        raise Refused(422, text, "validation")
    return count
