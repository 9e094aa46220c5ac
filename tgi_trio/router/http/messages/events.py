"""The events of a stream, rendered from each step's tokens; a class per API family.

An object renders one generation. It is called with the tokens of each step and, in the last call,
with the outcome or the error, inside the engine's fan-out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tgi_trio.router.http.messages.error_shapes import openai_event
from tgi_trio.router.http.messages.extras import PLAIN, ChunkExtras, TokenExtras
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.messages.render import (
    BOOLEAN,
    GOING_ON,
    NUMPY,
    ending_json,
    float32,
    stream_details_json,
    text_json,
    token_json,
    tokens_json,
    visible,
)
from tgi_trio.router.http.messages.usage import UsageCount, usage_json
from tgi_trio.router.request import Outcome, Token


class Events(Protocol):
    """Renders one generation of a stream."""

    def step(self, tokens: list[Token]) -> bytes:
        """Return the events of a step that does not end the generation."""

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        """Return the last events."""

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        """Return the events of the last tokens, then that of the error."""


_NATIVE_EVENT = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
    b'"generated_text":null,"details":null}\n\n'
)


class NativeEvents:
    """Events of /generate_stream, one per token; the last has the whole text."""

    __slots__ = ("_details", "_index", "_last_id", "_prefix")

    def __init__(self, prefix: str, details: bool) -> None:
        self._prefix = prefix  # the prompt, if the full text is asked for
        self._details = details
        self._index = 0
        self._last_id = 0

    def step(self, tokens: list[Token]) -> bytes:
        """Written out in full, since these are the hottest lines of the router."""
        events = []
        for token in tokens:
            self._last_id = token.id
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
        *others, last = tokens or [Token(self._last_id, "", 0.0, False)]
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

    Each event has `query_id`, the query's place in `inputs`, and `position`, the token's place in
    its answer (from 0). `index` counts the tokens of the whole stream, from 1.
    """

    def __init__(self, prefix: str, details: bool, query_id: int, index: Iterator[int]) -> None:
        """`index` is shared by the queries of one stream."""
        super().__init__(prefix, details)
        self._query_id = query_id
        self._positions = itertools.count()
        self._indexes = index

    def step(self, tokens: list[Token]) -> bytes:
        if tokens:
            self._last_id = tokens[-1].id
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


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that are the same in all events of one OpenAI call."""

    id: str  # by which clients assemble a stream
    created: int  # Unix seconds
    model: str
    fingerprint: str

    def fields(self) -> bytes:
        """Return `id`, `created`, `model` and `system_fingerprint`, in that order."""
        return b"%b,%b" % (self.opening(), self.names())

    def opening(self) -> bytes:
        """Return `id` and `created`."""
        return b'"id":%b,"created":%d' % (text_json(self.id), self.created)

    def names(self) -> bytes:
        """Return `model` and `system_fingerprint`."""
        return b'"model":%b,"system_fingerprint":%b' % (
            text_json(self.model),
            text_json(self.fingerprint),
        )


class ChatEvents:
    """Events of /v1/chat/completions: one chunk per token."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        usage: UsageCount,
        shown: TokenExtras = PLAIN,
        extras: ChunkExtras | None = None,
    ) -> None:
        self._envelope = envelope
        self._head = (
            b'data: {"object":"chat.completion.chunk",%b,"choices":[{"index":%d,'
            b'"delta":{"role":"assistant","content":' % (envelope.fields(), index)
        )
        self._usage = usage
        self._logprobs = shown.logprobs
        self._extras = extras
        self._plain = shown.logprobs is None and extras is None

    def step(self, tokens: list[Token]) -> bytes:
        if not self._plain:
            return b"".join([self._event(token, "", GOING_ON) for token in tokens])
        head = self._head
        if len(tokens) == 1:  # nearly always; joining a list would nearly double the time
            text = "" if tokens[0].special else tokens[0].text
            return b"%b%b%b" % (head, text_json(text), _CHAT_TAIL)
        return b"".join(
            [
                b"%b%b%b" % (head, text_json("" if token.special else token.text), _CHAT_TAIL)
                for token in tokens
            ]
        )

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        self._usage.add(outcome)
        ending = ending_json(outcome)
        if not tokens:
            return self._chunk([], outcome.tail, b"null", ending)
        return self.step(tokens[:-1]) + self._event(tokens[-1], outcome.tail, ending)

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + openai_event(problem, self._envelope.id)

    def _event(self, token: Token, tail: str, ending: bytes) -> bytes:
        logprobs = b"null" if self._logprobs is None else self._logprobs.chat([token])
        return self._chunk([token], visible(token) + tail, logprobs, ending)

    def _chunk(self, tokens: list[Token], content: str, logprobs: bytes, ending: bytes) -> bytes:
        return b'%b%b},"logprobs":%b,"finish_reason":%b%b' % (
            self._head,
            text_json(content),
            logprobs,
            ending,
            chat_chunk_end(self._extras, tokens),
        )


_CHAT_END = b'}],"usage":null}\n\n'
# For a token without extras.
CHAT_GOING_ON = b',"logprobs":null,"finish_reason":' + GOING_ON + _CHAT_END
_CHAT_TAIL = b"}" + CHAT_GOING_ON


def chat_chunk_end(extras: ChunkExtras | None, tokens: list[Token]) -> bytes:
    """Return the end of a chat chunk that has these tokens, after its finish reason."""
    if extras is None:
        return _CHAT_END
    ids = extras.tokens(tokens)
    return b'%b}],"usage":%b%b}\n\n' % (ids, extras.usage() or b"null", extras.prompt())


def chat_usage_event(envelope: Envelope, usage: UsageCount) -> bytes:
    """Return the chunk that follows the last one if usage is asked for."""
    return b'data: {"object":"chat.completion.chunk",%b,"choices":[],"usage":%b}\n\n' % (
        envelope.fields(),
        usage.json(),
    )


class CompletionEvents:
    """Events of /v1/completions, one per token; the last of each prompt has its usage."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        usage: UsageCount,
        echo: str = "",
        shown: TokenExtras = PLAIN,
        extras: ChunkExtras | None = None,
    ) -> None:
        choice = b'"choices":[{"index":%d,"text":' % index
        self._envelope = envelope
        self._head = b'data: {"object":"text_completion",%b,%b' % (envelope.opening(), choice)
        self._last_head = b'data: {"object":"text_completion",%b,%b' % (envelope.fields(), choice)
        self._names = envelope.names()
        self._tail = b',"logprobs":null,"finish_reason":%b}],%b}\n\n' % (GOING_ON, self._names)
        self._logprobs = shown.logprobs
        self._top = shown.top
        self._extras = extras
        self._offset = 0  # characters sent
        self._echo = echo  # the prompt, if it is to be sent with the first token
        self._usage = usage

    def step(self, tokens: list[Token]) -> bytes:
        if self._echo or self._logprobs is not None or self._extras is not None:
            return b"".join([self._event(token) for token in tokens])
        head, tail = self._head, self._tail
        if len(tokens) == 1:  # as in `ChatEvents.step`
            text = "" if tokens[0].special else tokens[0].text
            return b"%b%b%b" % (head, text_json(text), tail)
        return b"".join(
            [
                b"%b%b%b" % (head, text_json("" if token.special else token.text), tail)
                for token in tokens
            ]
        )

    def end(self, tokens: list[Token], outcome: Outcome) -> bytes:
        self._usage.add(outcome)
        events = self.step(tokens[:-1])
        text, logprobs = self._content(tokens[-1]) if tokens else (self._take_echo(), b"null")
        return events + (
            b'%b%b,"logprobs":%b,"finish_reason":%b%b}],"usage":%b}\n\n'
            % (
                self._last_head,
                text_json(text + outcome.tail),
                logprobs,
                ending_json(outcome),
                self._ids(tokens[-1:]),
                usage_json(outcome.prompt_tokens, outcome.generated_tokens, outcome.cached_tokens),
            )
        )

    def error(self, tokens: list[Token], problem: Problem) -> bytes:
        return self.step(tokens) + openai_event(problem, self._envelope.id)

    def _event(self, token: Token) -> bytes:
        text, logprobs = self._content(token)
        ids = self._ids([token])
        usage = self._extras.usage() if self._extras is not None else None
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}],%b%b}\n\n' % (
            self._head,
            text_json(text),
            logprobs,
            GOING_ON,
            ids,
            self._names,
            b"" if usage is None else b',"usage":' + usage,
        )

    def _ids(self, tokens: list[Token]) -> bytes:
        if self._extras is None:
            return b""
        return self._extras.prompt() + self._extras.tokens(tokens)

    def _content(self, token: Token) -> tuple[str, bytes]:
        """Return the text of the next event, after an echo if it is the first, and its logprobs."""
        echo, text = self._take_echo(), visible(token)
        logprobs = b"null"
        if self._logprobs is not None:
            logprobs = self._logprobs.completion([token], self._top, self._offset)
        self._offset += len(text)
        return echo + text, logprobs

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        self._offset += len(echo)
        return echo


def completion_usage_event(envelope: Envelope, usage: UsageCount) -> bytes:
    """Return the event that ends a stream if usage is asked for."""
    return b'data: {"object":"text_completion",%b,"choices":[],"usage":%b}\n\n' % (
        envelope.fields(),
        usage.json(),
    )
