"""Log-probabilities of answers in OpenAI's two forms, and of prompts in vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import orjson

from tgi_trio.router.http.messages.render import NUMPY, number_json, numbers_json, text_json
from tgi_trio.router.request import Outcome, Request, StoppingCriteria, Token
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.tokenizer import Tokenizer


class LogprobWriter:
    """Writes the log-probabilities of one call."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        """`as_ids`: a token is named `token_id:123`, which is unambiguous, not by its text."""
        self._bytes_of = tokenizer.token_bytes
        self._as_ids = as_ids

    def chat(self, tokens: Iterable[Token]) -> bytes:
        """Return ChatCompletionLogprobs."""
        return b'{"content":[%b]}' % b",".join(self.each(tokens))

    def each(self, tokens: Iterable[Token]) -> list[bytes]:
        """Return a ChatCompletionLogprob for each token."""
        return [self._chat_token(token) for token in tokens]

    def completion(
        self,
        tokens: Sequence[Token],
        top: int,
        offset: int = 0,
        prompt: tuple[str, Sequence[Token]] = ("", ()),
    ) -> bytes:
        """Return the logprobs object of /v1/completions.

        Each token has its `top` likeliest alternatives and itself, as at OpenAI. `offset`:
        characters before `tokens`. `prompt`: what these characters are, and its tokens, if they are
        to come before.
        """
        text, before = prompt
        offsets = _place(text, before)
        for token in tokens:
            offsets.append(offset)
            offset += 0 if token.special else len(token.text)
        tokens = [*before, *tokens]
        return b'{"tokens":%b,"token_logprobs":[%b],"top_logprobs":%b,"text_offset":%b}' % (
            orjson.dumps([self._name(token) for token in tokens]),
            b",".join(numbers_json([token.logprob for token in tokens])),
            orjson.dumps([self._alternatives(token, top) for token in tokens], option=NUMPY),
            orjson.dumps(offsets),
        )

    def _chat_token(self, token: Token) -> bytes:
        numbers = numbers_json([other.logprob for other in token.top])
        named = map(self._named, token.top, numbers)
        top = b",".join([b"{%b}" % each for each in named])
        return b'{%b,"top_logprobs":[%b]}' % (self._named(token, number_json(token.logprob)), top)

    def _named(self, token: Token, number: bytes) -> bytes:
        """Return a token's name, log-probability, which is `number`, and bytes, with commas."""
        data = self._bytes_of(token.id)
        return b'"token":%b,"logprob":%b,"bytes":%b' % (
            text_json(self._name(token)),
            number,
            b"null" if data is None else orjson.dumps(list(data)),
        )

    def _name(self, token: Token) -> str:
        return f"token_id:{token.id}" if self._as_ids else token.text

    def _alternatives(self, token: Token, top: int) -> dict[str, np.float32] | None:
        """Return log-probabilities by name; None for the first token, which has no prediction.

        If several tokens have the same text, such as parts of characters, the likeliest is shown.
        """
        if math.isnan(token.logprob):
            return None
        found: dict[str, np.float32] = {}
        for other in token.top[:top]:
            found.setdefault(self._name(other), np.float32(other.logprob))
        found[self._name(token)] = np.float32(token.logprob)
        return found


def _place(text: str, tokens: Iterable[Token]) -> list[int]:
    """Return where each token of a prompt begins in it; special ones may be written out there."""
    offsets: list[int] = []
    offset = 0
    for token in tokens:
        offsets.append(offset)
        if not token.special or text.startswith(token.text, offset):
            offset += len(token.text)
    return offsets


def prompt_tokens(tokenizer: Tokenizer, request: Request, outcome: Outcome) -> list[Token]:
    """Return a prompt's tokens if their log-probabilities were asked for, otherwise nothing."""
    if not outcome.prompt_logprobs:
        return []
    text = OutputText(tokenizer, [], StoppingCriteria(max_new_tokens=1))
    tops = outcome.prompt_tops or ((),) * len(outcome.prompt_logprobs)
    ids = request.prompt_ids.tolist()
    given = zip(ids, outcome.prompt_logprobs, tops, strict=False)
    tokens = [text.push(*token) for token in given]
    first = next((i for i, each in enumerate(tokens) if each.text and not each.special), None)
    if first is not None:
        # A decoder may cut the space in front of a text, which no token after others loses.
        shown = tokenizer.decode(ids[: first + 1])
        if tokens[first].text.endswith(shown):
            tokens[first].text = shown
    return tokens


def prompt_logprobs_json(tokens: Iterable[Token], top: int) -> bytes:
    """Return vLLM's `prompt_logprobs`: for each prompt token an object by token id, or null.

    The token itself comes first, then the `top` likeliest. Only these have a known rank.
    """
    return b"[%b]" % b",".join([_prompt_token_json(token, top) for token in tokens])


def _prompt_token_json(token: Token, top: int) -> bytes:
    if math.isnan(token.logprob):  # the first token has no prediction
        return b"null"
    ranks = {other.id: rank for rank, other in enumerate(token.top, start=1)}
    shown = [token, *(other for other in token.top[:top] if other.id != token.id)]
    return b"{%b}" % b",".join([_ranked_json(each, ranks.get(each.id)) for each in shown])


def _ranked_json(token: Token, rank: int | None) -> bytes:
    return b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}' % (
        token.id,
        number_json(token.logprob),
        b"null" if rank is None else b"%d" % rank,
        text_json(token.text),
    )
