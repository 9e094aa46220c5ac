"""Assigns tokens to the texts of an answer, for clients that ask for log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from tgi_trio.router.http.dialects.blocks import Block, BlockChange, BlockKind
from tgi_trio.router.http.messages.logprobs import LogprobWriter
from tgi_trio.router.http.messages.tool_calls import answer_tokens
from tgi_trio.router.request import Token

WANTED: Final = "message.output_text.logprobs"  # in `include`


class TextLogprobs:
    """The log-probabilities of an answer's texts, as JSON, without thoughts, calls and marks.

    A token whose text is held back comes with the piece that has its text.
    """

    def __init__(self, writer: LogprobWriter) -> None:
        self._writer = writer
        self._pending: list[Token] = []
        self._by_block: dict[int, list[bytes]] = defaultdict(list)  # by the index of the block
        self._last_piece: list[bytes] = []

    def follow(
        self, token: Token | None, changes: Iterable[tuple[BlockChange, Block, str]]
    ) -> Iterator[tuple[BlockChange, Block, str]]:
        """Yield the changes by a token, after assigning it to its text; None: the end."""
        if token is not None:
            self._pending.append(token)
        for each in changes:
            change, block, text = each
            if change is BlockChange.MORE:
                if block.kind is BlockKind.TEXT:
                    self._last_piece = self._writer.each(_last_of(self._pending, text))
                    self._by_block[block.index] += self._last_piece
                self._pending.clear()
            yield each

    def last_piece(self) -> bytes:
        """Return the log-probabilities of the last piece of a text, as a JSON list."""
        return _list(self._last_piece)

    def of(self, block: Block) -> Any:
        """Return the log-probabilities of a whole text, as raw JSON."""
        return msgspec.Raw(_list(self._by_block[block.index]))


def _last_of(tokens: Sequence[Token], text: str) -> list[Token]:
    """Return the last tokens, as many as make up `text`, since marks precede them."""
    found: list[Token] = []
    left = len(text)
    for token in reversed(answer_tokens(tokens)):
        if (left <= 0 and token.text) or (found and token.special):
            break  # parts of a character have no text until its last one
        if not token.special:
            found.append(token)
            left -= len(token.text)
    return found[::-1]


def _list(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(items)
