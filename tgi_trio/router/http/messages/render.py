"""Pieces of JSON that replies and events share, so that a stream and a body cannot differ.

They are written by templates: an event takes about a microsecond, which each step pays for each
stream. Log-probabilities are float32, written with the fewest digits that identify them, as TGI
does; values that are not finite become null.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from tgi_trio.router.request import FinishReason, Outcome, Token

NUMPY = orjson.OPT_SERIALIZE_NUMPY
BOOLEAN = (b"false", b"true")

# OpenAI has one reason for stopping, both for stop strings and for the model's own end.
OPENAI_REASONS = {
    FinishReason.LENGTH: b'"length"',
    FinishReason.EOS_TOKEN: b'"stop"',
    FinishReason.STOP_SEQUENCE: b'"stop"',
}

# What follows `"finish_reason":` before the end; at the end, `ending_json`.
GOING_ON = b'null,"stop_reason":null,"matched_stop":null'

text_json = orjson.dumps
float32 = np.float32


def number_json(value: float) -> bytes:
    """Return a float32 as JSON."""
    return orjson.dumps(np.float32(value), option=NUMPY)


def numbers_json(values: Sequence[float]) -> list[bytes]:
    """Return each of several float32 as JSON: one by one, they take four times as long."""
    if not values:
        return []
    return orjson.dumps(np.array(values, np.float32), option=NUMPY)[1:-1].split(b",")


def optional_json(value: int | None) -> bytes:
    """Return an integer or null."""
    return b"null" if value is None else b"%d" % value


def ending_json(outcome: Outcome, reason: bytes | None = None) -> bytes:
    """Return OpenAI's finish reason, vLLM's `stop_reason` and SGLang's `matched_stop`, with commas.

    The last two have the stop string, expression or token id that ended the generation; the model's
    own end token is only in `matched_stop`. `reason`: the finish reason as JSON, if it is not the
    outcome's.
    """
    matched = None if outcome.reason is FinishReason.LENGTH else outcome.matched
    stop = None if outcome.reason is FinishReason.EOS_TOKEN else matched
    return b'%b,"stop_reason":%b,"matched_stop":%b' % (
        reason or OPENAI_REASONS[outcome.reason],
        orjson.dumps(stop),
        orjson.dumps(matched),
    )


def token_json(token: Token, tail: str = "") -> bytes:
    """Return a native Token; `tail` is text without a token, shown with the last one."""
    return b'{"id":%d,"text":%b,"logprob":%b,"special":%b}' % (
        token.id,
        orjson.dumps(token.text + tail),
        orjson.dumps(np.float32(token.logprob), option=NUMPY),
        BOOLEAN[token.special],
    )


def tokens_json(tokens: Sequence[Token]) -> bytes:
    """Return a list of native Tokens."""
    numbers = numbers_json([token.logprob for token in tokens])
    return b"[%b]" % b",".join(
        [
            b'{"id":%d,"text":%b,"logprob":%b,"special":%b}'
            % (token.id, text_json(token.text), number, BOOLEAN[token.special])
            for token, number in zip(tokens, numbers, strict=True)
        ]
    )


def prefill_json(ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[float]) -> bytes:
    """Return the list of PrefillTokens."""
    return b"[%b]" % b",".join(
        b'{"id":%d,"text":%b,"logprob":%b}' % (id, orjson.dumps(text), number_json(logprob))
        for id, text, logprob in zip(ids, texts, logprobs, strict=True)
    )


def visible(token: Token) -> str:
    """Return a token's text for OpenAI's clients, to whom special tokens are not shown."""
    return "" if token.special else token.text


def stream_details_json(outcome: Outcome) -> bytes:
    """Return the StreamDetails of a native stream."""
    return b'{"finish_reason":"%b","generated_tokens":%d,"seed":%b,"input_length":%d}' % (
        outcome.reason.value.encode(),
        outcome.generated_tokens,
        optional_json(outcome.seed),
        outcome.prompt_tokens,
    )
