"""Pieces of JSON that replies and events share, so that a stream and a body cannot differ.

Written by template: an event costs about a microsecond, which is what a step pays for each stream.
Log-probabilities are float32 and written with the fewest digits that name them, as TGI does;
what is not finite becomes null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import orjson

from tgi_trio.router.request import FinishReason, Outcome, Token

NUMPY = orjson.OPT_SERIALIZE_NUMPY
BOOLEAN = (b"false", b"true")

# OpenAI knows one way to stop; a stop string and the model's own end are the same to it.
OPENAI_REASONS = {
    FinishReason.LENGTH: b'"length"',
    FinishReason.EOS_TOKEN: b'"stop"',
    FinishReason.STOP_SEQUENCE: b'"stop"',
}

text_json = orjson.dumps
float32 = np.float32


def number_json(value: float) -> bytes:
    """Return a float32 as JSON."""
    return orjson.dumps(np.float32(value), option=NUMPY)


def optional_json(value: int | None) -> bytes:
    """Return an integer or null."""
    return b"null" if value is None else b"%d" % value


def token_json(token: Token, tail: str = "") -> bytes:
    """Return a native Token; `tail` is text that no token carried, shown with the last one."""
    return b'{"id":%d,"text":%b,"logprob":%b,"special":%b}' % (
        token.id,
        orjson.dumps(token.text + tail),
        orjson.dumps(np.float32(token.logprob), option=NUMPY),
        BOOLEAN[token.special],
    )


def tokens_json(tokens: Iterable[Token]) -> bytes:
    """Return a list of native Tokens."""
    return b"[%b]" % b",".join(map(token_json, tokens))


def prefill_json(ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[float]) -> bytes:
    """Return the list of PrefillTokens."""
    return b"[%b]" % b",".join(
        b'{"id":%d,"text":%b,"logprob":%b}' % (id, orjson.dumps(text), number_json(logprob))
        for id, text, logprob in zip(ids, texts, logprobs, strict=True)
    )


def usage_json(prompt_tokens: int, completion_tokens: int) -> bytes:
    """Return OpenAI's Usage."""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
    )


def chat_logprob_json(token: Token) -> bytes:
    """Return the ChatCompletionLogprob of one token."""
    top = b",".join(
        b'{"token":%b,"logprob":%b}' % (orjson.dumps(other.text), number_json(other.logprob))
        for other in token.top
    )
    return b'{"token":%b,"logprob":%b,"top_logprobs":[%b]}' % (
        orjson.dumps(token.text),
        number_json(token.logprob),
        top,
    )


def chat_logprobs_json(tokens: Iterable[Token]) -> bytes:
    """Return ChatCompletionLogprobs."""
    return b'{"content":[%b]}' % b",".join(map(chat_logprob_json, tokens))


def completion_logprobs_json(tokens: Sequence[Token], top: int, offset: int = 0) -> bytes:
    """Return the logprobs object of /v1/completions; `offset` characters came before `tokens`."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += 0 if token.special else len(token.text)
    tops = b"null"
    if top:
        tops = orjson.dumps(
            [
                {other.text: np.float32(other.logprob) for other in token.top} or None
                for token in tokens
            ],
            option=NUMPY,
        )
    return b'{"tokens":%b,"token_logprobs":[%b],"top_logprobs":%b,"text_offset":%b}' % (
        orjson.dumps([token.text for token in tokens]),
        b",".join(number_json(token.logprob) for token in tokens),
        tops,
        orjson.dumps(offsets),
    )


def visible(token: Token) -> str:
    """Return a token's text as OpenAI's clients see it: special tokens have none."""
    return "" if token.special else token.text


def stream_details_json(outcome: Outcome) -> bytes:
    """Return the StreamDetails of a native stream."""
    return b'{"finish_reason":"%b","generated_tokens":%d,"seed":%b,"input_length":%d}' % (
        outcome.reason.value.encode(),
        outcome.generated_tokens,
        optional_json(outcome.seed),
        outcome.prompt_tokens,
    )
