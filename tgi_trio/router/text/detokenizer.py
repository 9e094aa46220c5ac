"""Incremental detokenisation: token ids to text, one token at a time.

The pieces of a generation and what `flush` returns, concatenated, are the text that the tokenizer
decodes from all ids after the prompt. Text is held back only while a character is incomplete.

One case differs from the tokenizer: byte-fallback decoders turn a whole run of byte tokens into
U+FFFD if any of its bytes is invalid. Characters already sent cannot be taken back, so complete
characters of such a run stay, and only the invalid bytes become U+FFFD.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from tgi_trio.router.text.pieces import Pieces

CONTEXT_TOKENS = 5  # prompt tokens that are context for the first generated one, as in TGI
_MAX_CHARACTER_BYTES = 4  # of UTF-8
_MAX_WINDOW = 32  # most tokens without a complete character at the end; only invalid bytes reach it
_REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer(Protocol):
    """Turns one generation into text; the caller leaves out special tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" inside a character."""
        ...

    def flush(self) -> str:
        """Return an incomplete character at the end as U+FFFD."""
        ...


class PieceDetokenizer:
    """For tokenizers whose tokens have a fixed text or fixed bytes."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int]) -> None:
        """Begin after `prompt_ids`; prompts that were given as ids may end within a character."""
        self._pieces = pieces
        tail: list[bytes] = []
        for token_id in reversed(prompt_ids[-CONTEXT_TOKENS:]):
            piece = pieces[token_id]
            if isinstance(piece, str):
                break
            tail.append(piece)
        data = b"".join(reversed(tail))
        self._pending = data[utf_8_decode(data, "replace", False)[1] :]

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if self._pending and piece:
                return self.flush() + piece
            return piece
        data = self._pending + piece
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        if self._pieces.per_byte:
            return _REPLACEMENT * len(pending)
        # Usually this is the valid beginning of one character, but the decoder also keeps the
        # beginning of a surrogate (ED A0..BF), which is invalid already: two bytes, two
        # replacements.
        return utf_8_decode(pending, "replace", True)[0]


class WindowDetokenizer:
    """For any tokenizer: decodes a short window, and releases what was not released before.

    The window begins with the tokens of the previous complete text, so that each token is decoded
    after a neighbour, and spacing rules apply as in the whole text. It is cut whenever its text
    ends with a complete character.
    """

    __slots__ = ("_decode", "_known", "_released", "_window")

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._known = len(self._window)  # tokens that are only context
        self._released = len(decode(self._window))  # characters of the window's text

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        complete = len(text.rstrip(_REPLACEMENT))
        if complete == len(text):
            return self._cut(text)
        # An incomplete character is decoded as one U+FFFD or one per byte; any more are invalid.
        complete = max(complete, len(text) - _MAX_CHARACTER_BYTES + 1)
        if len(self._window) - self._known > _MAX_WINDOW:
            return self._cut(text)
        piece = text[self._released : complete]
        self._released = max(self._released, complete)
        return piece

    def flush(self) -> str:
        return self._cut(self._decode(self._window))

    def _cut(self, text: str) -> str:
        piece = text[self._released :]
        if piece:
            del self._window[: self._known]
            self._known = len(self._window)
            text = self._decode(self._window)
            self._released = len(text)
        elif len(self._window) > self._known:
            self._window.pop()  # without text it is no context for the next token
        return piece
