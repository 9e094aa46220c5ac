"""The text or bytes of each token id, for decoders that do not depend on neighbouring tokens.

| decoder of tokenizer.json | a token is | examples |
|---|---|---|
| ByteLevel | bytes, written in GPT-2's printable alphabet; added: text | GPT-2, Llama 3, Qwen |
| Replace, ByteFallback, Fuse, Strip | text as below, or one byte as `<0xE2>` | Llama 2, Gemma |
| Metaspace | text with U+2581 for a space | T5, XLM-R |

Only the very first token of a text may differ (its leading space is cut); a generated token always
follows a prompt, so it is never that one. Any other decoder uses the slower
`tokenizers.Tokenizer.decode`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Piece = str | bytes  # bytes: not valid UTF-8 without its neighbours
TokenOf = Callable[[int], str | None]


class Pieces(dict[int, Piece]):
    """Token id -> piece, filled on demand; at most as large as the vocabulary.

    A piece is `str` if the token is complete text, `bytes` if it is a part of a character.
    """

    def __init__(
        self,
        token_of: TokenOf,
        piece_of: Callable[[str], Piece],
        per_byte: bool,
        plain: Mapping[int, str] | None = None,
    ) -> None:
        """`per_byte`: an incomplete character becomes one U+FFFD per byte instead of a single one.

        `plain`: the text of ids for which `piece_of` is not called.
        """
        super().__init__(plain or {})
        self._token_of = token_of
        self._piece_of = piece_of
        self.per_byte = per_byte

    def __missing__(self, token_id: int) -> Piece:
        token = self._token_of(token_id)
        # Models that pad their output layer have ids beyond the vocabulary, which have no text.
        piece = "" if token is None else self._piece_of(token)
        self[token_id] = piece
        return piece


def pieces_for(
    decoder_state: bytes | None, token_of: TokenOf, added: Mapping[int, str]
) -> Pieces | None:
    """Return the pieces of a decoder given as JSON, or None if tokens depend on neighbours.

    `added`: id -> text of the tokens beside those of the model's vocabulary.
    """
    decoder = json.loads(decoder_state) if decoder_state else {}
    parts = decoder.get("decoders", [decoder])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        # The library would decode `café`, an added token, by the alphabet as well: to `caf\ufffd`.
        return Pieces(token_of, _byte_level(), per_byte=False, plain=added)
    if kinds == ["Metaspace"]:
        space = parts[0]["replacement"]
        return Pieces(token_of, lambda token: token.replace(space, " "), per_byte=False)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _only_cuts_the_start(parts[3:]):
        mark = parts[0]["pattern"].get("String")
        if mark:
            return Pieces(token_of, _byte_fallback(mark, parts[0]["content"]), per_byte=True)
    return None


def _only_cuts_the_start(parts: list[dict[str, Any]]) -> bool:
    return all(part["type"] == "Strip" and part["stop"] == 0 for part in parts)


def _byte_level() -> Callable[[str], Piece]:
    alphabet = _printable_bytes()

    def piece_of(token: str) -> Piece:
        try:
            data = bytes([alphabet[character] for character in token])
        except KeyError:  # not written in the alphabet, so it is plain text
            return token
        return _text_if_complete(data)

    return piece_of


def _printable_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_fallback(mark: str, space: str) -> Callable[[str], Piece]:
    def piece_of(token: str) -> Piece:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return _text_if_complete(bytes([int(token[3:5], 16)]))
            except ValueError:
                return token
        return token.replace(mark, space)

    return piece_of


def _text_if_complete(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
