"""OpenAI's usage: the tokens of a call, by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tgi_trio.router.http.messages import schema
from tgi_trio.router.request import Outcome


@dataclass(slots=True)
class UsageCount:
    """Tokens of one prompt and of the answers to it, added up as answers end."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, not computed again; None: no answer has ended
    thought_tokens: int = 0  # part of the completions: thoughts and their marks

    def add(self, outcome: Outcome) -> None:
        """Count an answer that has ended.

        A prompt counts once for all its answers, so only tokens that none of them computed are
        cached.
        """
        self.completion_tokens += outcome.generated_tokens
        if outcome.answer is not None:
            self.thought_tokens += outcome.answer.thought_tokens
        known = outcome.cached_tokens if self.cached_tokens is None else self.cached_tokens
        self.cached_tokens = min(known, outcome.cached_tokens)

    @classmethod
    def total(cls, counts: Iterable[UsageCount]) -> UsageCount:
        """Return the sum over the prompts of a call."""
        whole = cls(0, 0, 0)
        for each in counts:
            whole.prompt_tokens += each.prompt_tokens
            whole.completion_tokens += each.completion_tokens
            whole.thought_tokens += each.thought_tokens
            whole.cached_tokens = (whole.cached_tokens or 0) + (each.cached_tokens or 0)
        return whole

    def json(self) -> bytes:
        """Return OpenAI's Usage."""
        return usage_json(
            self.prompt_tokens, self.completion_tokens, self.cached_tokens or 0, self.thought_tokens
        )


def usage_json(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, thought_tokens: int = 0
) -> bytes:
    """Return OpenAI's Usage with its details; clients' predictions are not served."""
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d},'
        b'"completion_tokens_details":{"reasoning_tokens":%d,"accepted_prediction_tokens":0,'
        b'"rejected_prediction_tokens":0}}'
        % (
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            cached_tokens,
            thought_tokens,
        )
    )


def running_usage_json(prompt_tokens: int, completion_tokens: int) -> bytes:
    """Return the Usage of an answer that goes on, without details, which are known at its end."""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
    )


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Where a stream has its usage, in addition to where it always does."""

    last: bool = False  # in an event of its own after all answers
    running: bool = False  # in every event, for its answer so far

    @classmethod
    def from_options(cls, options: schema.StreamOptions | None) -> StreamUsage:
        """Return what `stream_options` asks for.

        `continuous_usage_stats` alone implies both; `include_usage: false` excludes both, as in
        vLLM, where the former is a detail of the latter.
        """
        if options is None:
            return cls()
        running = options.continuous_usage_stats is True
        last = running if options.include_usage is None else options.include_usage
        return cls(last, running and last)
