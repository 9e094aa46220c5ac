"""What each API family makes of a step's tokens: the events of a stream.

An object of these classes renders one generation: called with the tokens of a step and, in the
last call, the outcome or the error. It runs inside the engine's fan-out, once per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tgi_trio.router.http.errors import Problem
from tgi_trio.router.http.render import (
    BOOLEAN,
    NUMPY,
    OPENAI_REASONS,
    chat_logprobs_json,
    completion_logprobs_json,
    float32,
    stream_details_json,
    text_json,
    token_json,
    tokens_json,
    usage_json,
    visible,
)
from tgi_trio.router.request import Outcome, Token


class Events(Protocol):
    """Renders one generation of a stream."""

    def step(self, tokens: list[Token]) -> bytes:
        """Return the events of a step that did not end the generation."""

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        """Return the last events."""

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        """Return the events of the last tokens, then of the error."""


_NATIVE_EVENT = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
    b'"generated_text":null,"details":null}\n\n'
)


class NativeEvents:
    """Events of /generate_stream: one per token; the last carries the text."""

    def __init__(self, prefix: str, details: bool) -> None:
        self._prefix = prefix  # the prompt, where the full text is asked for
        self._details = details
        self._index = 0
        self._last = Token(0, "", 0.0, False)

    def step(self, tokens: list[Token]) -> bytes:
        """Written out in full: the hottest lines of the router run here."""
        events = []
        for token in tokens:
            self._last = token
            if token.top:
                events.append(self._event(token, "", b"null", b"null"))
                continue
            self._index = index = self._index + 1
            events.append(
                _NATIVE_EVENT
                % (
                    index,
                    token.id,
                    text_json(token.text),
                    text_json(float32(token.logprob), option=NUMPY),
                    BOOLEAN[token.special],
                )
            )
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        *others, last = tokens or [Token(self._last.id, "", 0.0, False)]
        details = stream_details_json(outcome) if self._details else b"null"
        text = text_json(self._prefix + outcome.text)
        return self.step(others) + self._event(last, outcome.tail, text, details)

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + problem.native_event()

    def _event(self, token: Token, tail: str, text: bytes, details: bytes) -> bytes:
        top = b',"top_tokens":%b' % tokens_json(token.top) if token.top else b""
        return b'data: {%b,"token":%b%b,"generated_text":%b,"details":%b}\n\n' % (
            self._place(),
            token_json(token, tail),
            top,
            text,
            details,
        )

    def _place(self) -> bytes:
        self._index += 1
        return b'"index":%d' % self._index


class QueryEvents(NativeEvents):
    """Events of one of several queries that share a stream.

    Each says whose it is (`query_id`, the query's place in `inputs`) and which token of that
    answer (`position`, from 0); `index` counts the tokens of the whole stream, from 1.
    """

    def __init__(self, prefix: str, details: bool, query_id: int, index: Iterator[int]) -> None:
        """`index` is common to the queries of one stream."""
        super().__init__(prefix, details)
        self._query_id = query_id
        self._positions = itertools.count()
        self._indexes = index

    def step(self, tokens: list[Token]) -> bytes:
        if tokens:
            self._last = tokens[-1]
        return b"".join([self._event(token, "", b"null", b"null") for token in tokens])

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        error = b'data: {"query_id":%d,%b\n\n' % (self._query_id, problem.body()[1:])
        return self.step(tokens) + error

    def _place(self) -> bytes:
        return b'"query_id":%d,"position":%d,"index":%d' % (
            self._query_id,
            next(self._positions),
            next(self._indexes),
        )


@dataclass(slots=True)
class UsageCount:
    """Tokens of all generations of one call, added up as they end."""

    prompt_tokens: int
    completion_tokens: int = 0

    def json(self) -> bytes:
        """Return OpenAI's Usage."""
        return usage_json(self.prompt_tokens, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in every event of one OpenAI call."""

    created: int  # Unix seconds
    model: str
    fingerprint: str

    def fields(self) -> bytes:
        """Return `created`, `model` and `system_fingerprint` in that order."""
        return b'"created":%d,"model":%b,"system_fingerprint":%b' % (
            self.created,
            text_json(self.model),
            text_json(self.fingerprint),
        )


class ChatEvents:
    """Events of /v1/chat/completions: one chunk per token."""

    def __init__(self, envelope: Envelope, index: int, logprobs: bool, usage: UsageCount) -> None:
        self._head = (
            b'data: {"object":"chat.completion.chunk","id":"",%b,"choices":[{"index":%d,'
            b'"delta":{"role":"assistant","content":' % (envelope.fields(), index)
        )
        self._logprobs = logprobs
        self._usage = usage

    def step(self, tokens: list[Token]) -> bytes:
        return b"".join([self._event(token, "", b"null") for token in tokens])

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        self._usage.completion_tokens += outcome.generated_tokens
        reason = OPENAI_REASONS[outcome.reason]
        if not tokens:
            return self._chunk(outcome.tail, b"null", reason)
        return self.step(tokens[:-1]) + self._event(tokens[-1], outcome.tail, reason)

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + problem.openai_event()

    def _event(self, token: Token, tail: str, reason: bytes) -> bytes:
        logprobs = chat_logprobs_json([token]) if self._logprobs else b"null"
        return self._chunk(visible(token) + tail, logprobs, reason)

    def _chunk(self, content: str, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n' % (
            self._head,
            text_json(content),
            logprobs,
            reason,
        )


def chat_usage_event(envelope: Envelope, usage: UsageCount) -> bytes:
    """Return the chunk that follows the last one when usage is asked for."""
    return b'data: {"object":"chat.completion.chunk","id":"",%b,"choices":[],"usage":%b}\n\n' % (
        envelope.fields(),
        usage.json(),
    )


class CompletionEvents:
    """Events of /v1/completions: one per token; the last of each prompt carries its usage."""

    def __init__(
        self, envelope: Envelope, index: int, logprobs: int | None, echo: str, usage: UsageCount
    ) -> None:
        fields = envelope.fields()
        created, names = fields.split(b",", 1)
        choice = b'"choices":[{"index":%d,"text":' % index
        self._head = b'data: {"object":"text_completion","id":"",%b,%b' % (created, choice)
        self._names = names
        self._last_head = b'data: {"object":"text_completion","id":"",%b,%b' % (fields, choice)
        self._top = logprobs  # None: not asked for
        self._offset = 0  # characters sent
        self._echo = echo  # the prompt, sent with the first token
        self._usage = usage

    def step(self, tokens: list[Token]) -> bytes:
        return b"".join([self._event(token) for token in tokens])

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        self._usage.completion_tokens += outcome.generated_tokens
        text, logprobs = "", b"null"
        if tokens:
            text, logprobs = self._content(tokens[-1])
        return self.step(tokens[:-1]) + (
            b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n'
            % (
                self._last_head,
                text_json(self._take_echo() + text + outcome.tail),
                logprobs,
                OPENAI_REASONS[outcome.reason],
                usage_json(outcome.prompt_tokens, outcome.generated_tokens),
            )
        )

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + problem.openai_event()

    def _event(self, token: Token) -> bytes:
        text, logprobs = self._content(token)
        return b'%b%b,"logprobs":%b,"finish_reason":null}],%b}\n\n' % (
            self._head,
            text_json(self._take_echo() + text),
            logprobs,
            self._names,
        )

    def _content(self, token: Token) -> tuple[str, bytes]:
        text = visible(token)
        logprobs = b"null"
        if self._top is not None:
            offset = self._offset + len(self._echo)
            logprobs = completion_logprobs_json([token], self._top, offset)
        self._offset += len(text)
        return text, logprobs

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        self._offset += len(echo)
        return echo


def completion_usage_event(envelope: Envelope, usage: UsageCount) -> bytes:
    """Return the event that ends a stream when usage is asked for."""
    return b'data: {"object":"text_completion","id":"",%b,"choices":[],"usage":%b}\n\n' % (
        envelope.fields(),
        usage.json(),
    )
