"""Optional fields in the events of an OpenAI answer: token ids and running usage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import orjson

from tgi_trio.router.http.messages.logprobs import LogprobWriter
from tgi_trio.router.http.messages.render import NUMPY
from tgi_trio.router.http.messages.usage import running_usage_json
from tgi_trio.router.request import Request, Token


@dataclass(frozen=True, slots=True)
class TokenExtras:
    """What the answers to one call show of their tokens."""

    logprobs: LogprobWriter | None = None
    top: int = 0  # alternatives per token of a completion
    token_ids: bool = False
    running_usage: bool = False

    def extras(self, request: Request) -> ChunkExtras | None:
        """Return the optional fields of one generation's events; None if there are none."""
        if not (self.token_ids or self.running_usage):
            return None
        return ChunkExtras(request, self.token_ids, self.running_usage)


PLAIN: Final = TokenExtras()


class ChunkExtras:
    """Token ids and usage of one generation, event by event.

    Every method returns fields that begin with a comma, or nothing.
    """

    def __init__(self, request: Request, token_ids: bool, usage: bool) -> None:
        self._token_ids = token_ids
        self._prompt = prompt_ids_json(request) if token_ids else b""
        self._usage = usage
        self._prompt_tokens = len(request.prompt_ids)
        self._completion_tokens = 0

    def prompt(self) -> bytes:
        """Return `prompt_token_ids`, in the first call only."""
        prompt, self._prompt = self._prompt, b""
        return prompt

    def tokens(self, tokens: list[Token]) -> bytes:
        """Return `token_ids` of an event's tokens, and count them."""
        self._completion_tokens += len(tokens)
        return token_ids_json(tokens) if self._token_ids else b""

    def usage(self) -> bytes | None:
        """Return the Usage so far; None if it is not asked for."""
        if not self._usage:
            return None
        return running_usage_json(self._prompt_tokens, self._completion_tokens)


def prompt_ids_json(request: Request) -> bytes:
    """Return the field `prompt_token_ids`, after a comma."""
    return b',"prompt_token_ids":%b' % orjson.dumps(request.prompt_ids, option=NUMPY)


def token_ids_json(tokens: Iterable[Token]) -> bytes:
    """Return the field `token_ids`, after a comma."""
    return b',"token_ids":%b' % orjson.dumps([token.id for token in tokens])
