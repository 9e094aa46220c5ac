"""Answers of /infill, as a body and as a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from tgi_trio.router.http.dialects.llama_cpp.replies import (
    InfillReply,
    InfillTimings,
    StopType,
)
from tgi_trio.router.http.messages.error_shapes import openai_event
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import visible
from tgi_trio.router.request import FinishReason, Outcome, Token
from tgi_trio.router.telemetry.request_stats import RequestStats

_SLOT: Final = 0  # there are no slots; clients read a number


@dataclass(frozen=True, slots=True)
class InfillAnswer:
    """What is known of an answer before it begins."""

    model: str
    prompt: str
    prompt_tokens: int
    settings: Mapping[str, Any]  # as the client gave them, or their defaults
    fields: Sequence[str]  # paths of the fields to be answered; none: all
    truncated: bool
    wanted: bool  # whether any text is: without it the prompt is only computed

    def write(
        self, outcome: Outcome, stats: RequestStats, content: str, tokens: Sequence[int]
    ) -> bytes:
        """Return the reply, or the data of the last event, with this `content`."""
        word = _stopping_word(outcome) if self.wanted else ""
        count = outcome.generated_tokens if self.wanted else 0
        reply = InfillReply(
            index=0,
            content=content,
            tokens=list(tokens),
            id_slot=_SLOT,
            stop=True,
            model=self.model,
            tokens_predicted=count,
            tokens_evaluated=self.prompt_tokens,
            generation_settings=dict(self.settings),
            prompt=self.prompt,
            has_new_line=self.wanted and "\n" in outcome.text,
            truncated=self.truncated,
            stop_type=_stop_type(outcome, word) if self.wanted else "limit",
            stopping_word=word,
            tokens_cached=self.prompt_tokens + max(0, count - 1),  # the last is not computed
            timings=_timings(stats, count),
        )
        whole = msgspec.to_builtins(reply)
        return orjson.dumps(_select(whole, self.fields) if self.fields else whole)


class InfillEvents:
    """Events of a stream: one per token, then one with everything else."""

    def __init__(
        self, answer: InfillAnswer, id: str, stats: Callable[[Outcome], RequestStats]
    ) -> None:
        """`id`: of the call, for errors; `stats`: of a generation that ends now."""
        self._answer = answer
        self._id = id
        self._stats = stats
        self._count = 0

    def step(self, tokens: list[Token]) -> bytes:
        if not self._answer.wanted:
            return b""
        return b"".join([self._event(token) for token in tokens])

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        events = self.step(tokens)
        tail = outcome.tail if self._answer.wanted else ""
        return events + _event(self._answer.write(outcome, self._stats(outcome), tail, ()))

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + openai_event(problem, self._id)

    def _event(self, token: Token) -> bytes:
        self._count += 1
        return _event(
            orjson.dumps(
                {
                    "index": 0,
                    "content": visible(token),
                    "tokens": [token.id],
                    "stop": False,
                    "id_slot": _SLOT,
                    "tokens_predicted": self._count,
                    "tokens_evaluated": self._answer.prompt_tokens,
                }
            )
        )


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _stopping_word(outcome: Outcome) -> str:
    ended = outcome.reason is FinishReason.STOP_SEQUENCE
    return outcome.matched if ended and isinstance(outcome.matched, str) else ""


def _stop_type(outcome: Outcome, word: str) -> StopType:
    """Return llama.cpp's word for why a text has ended."""
    if word:
        return "word"
    if outcome.reason is FinishReason.STOP_SEQUENCE:
        # A token that begins another file, or nothing: a line has ended it.
        return "limit" if outcome.matched is None else "eos"
    return "eos" if outcome.reason is FinishReason.EOS_TOKEN else "limit"


def _timings(stats: RequestStats, predicted: int) -> InfillTimings:
    computed = stats.prompt_tokens - stats.cached_tokens
    prompt, decode = 1e3 * stats.prefill, 1e3 * stats.decode
    return InfillTimings(
        cache_n=stats.cached_tokens,
        prompt_n=computed,
        prompt_ms=round(prompt, 3),
        prompt_per_token_ms=_ratio(prompt, computed),
        prompt_per_second=_ratio(1e3 * computed, prompt),
        predicted_n=predicted,
        predicted_ms=round(decode, 3),
        predicted_per_token_ms=_ratio(decode, predicted),
        predicted_per_second=_ratio(1e3 * predicted, decode),
    )


def _ratio(whole: float, parts: float) -> float:
    return round(whole / parts, 3) if parts else 0.0


def _select(reply: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields at these paths, such as `timings/prompt_n`; what is not there is left out.

    Each is named by its whole path, as at llama.cpp.
    """
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = reply
        for key in path.split("/"):
            value = value.get(key, msgspec.UNSET) if isinstance(value, Mapping) else msgspec.UNSET
        if value is not msgspec.UNSET:
            selected[path] = value
    return selected
