"""Replies of /infill as types: written by `answer.py`, shown in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from tgi_trio.router.http.messages.replies import StreamReceipt

StopType = Literal["eos", "word", "limit"]


class InfillTimings(Struct, forbid_unknown_fields=True):
    """What an answer cost: of the prompt only what was computed. Times in milliseconds."""

    cache_n: int  # tokens of the prompt that were computed before
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillReply(Struct, forbid_unknown_fields=True):
    """What belongs into the gap, or the last event of a stream.

    With `response_fields` the reply has those fields alone, each under the path that was asked for.
    """

    index: int
    content: str
    tokens: list[int]  # with `return_tokens`
    id_slot: int
    stop: bool  # True
    model: str
    tokens_predicted: int
    tokens_evaluated: int  # of the prompt
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool  # something that stood around the gap, or in other files, was left out
    stop_type: StopType
    stopping_word: str
    tokens_cached: int  # of prompt and answer, kept for later requests
    timings: InfillTimings
    receipt: StreamReceipt | UnsetType = UNSET  # only in streams


class InfillEvent(Struct, forbid_unknown_fields=True):
    """A token of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool  # False
    id_slot: int
    tokens_predicted: int  # so far
    tokens_evaluated: int
