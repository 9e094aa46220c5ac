"""Decodes and encodes long lists piece by piece: messages of a chat, ids of a prompt, tools.

The decoder holds the interpreter (GIL) for as long as a call takes, 3.5 ms for a megabyte, and the
loop waits for it. Finding where the elements of a list begin takes a quarter of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.inspect import ListType, StructType, Type, UnionType, type_info

_LONG: Final = 1 << 15  # bytes of a list that is decoded in pieces
_PIECE: Final = 1 << 15  # bytes of a piece: an eighth of a millisecond

_WRITTEN: Final = 64  # elements that are written at a time: each may be large, as tools are

_RAWS: Final = msgspec.json.Decoder(list[Raw])


class ListPieces:
    """Decodes bodies of one struct type, its long lists in pieces."""

    def __init__(self, shape: type) -> None:
        info = type_info(shape)
        fields = info.fields if isinstance(info, StructType) else ()
        types = {each.name: each.type for each in msgspec.structs.fields(shape)} if fields else {}
        self._whole: msgspec.json.Decoder[Any] = msgspec.json.Decoder(shape)
        # By the field's name in JSON: its name here, and what decodes a piece of it.
        self._lists: Mapping[str, tuple[str, msgspec.json.Decoder[Any]]] = {
            each.encode_name: (each.name, msgspec.json.Decoder(types[each.name]))
            for each in fields
            if _may_be_cut(each.type)
        }

    def decode(self, fields: Mapping[str, Raw]) -> Any:
        """Return a body of which these are the fields, as they are written.

        Raises msgspec.DecodeError; that of the whole body may say it in other words.
        """
        shown = {name: bytes(raw) for name, raw in fields.items()}
        cut: list[tuple[str, msgspec.json.Decoder[Any], Iterator[bytes]]] = []
        for name in self._lists.keys() & shown.keys():
            text = shown[name]
            if len(text) >= _LONG and text.startswith(b"["):
                pieces = _cut_list(text)
                shown[name] = next(pieces)
                cut.append((*self._lists[name], pieces))
        members = (msgspec.json.encode(name) + b":" + text for name, text in shown.items())
        body = self._whole.decode(b"{%b}" % b",".join(members))
        for attribute, decoder, pieces in cut:
            found = getattr(body, attribute)
            for piece in pieces:
                found += decoder.decode(piece)
        return body


def encode_list(items: Sequence[Any]) -> Raw:
    """Return a list in JSON, written in pieces."""
    pieces = [
        msgspec.json.encode(items[first : first + _WRITTEN])[1:-1]
        for first in range(0, len(items), _WRITTEN)
    ]
    return Raw(b"[%b]" % b",".join(pieces))


def _may_be_cut(shape: Type) -> bool:
    """Return whether values of a type may be lists of any length from 1 on."""
    lists = shape.types if isinstance(shape, UnionType) else (shape,)
    return any(
        isinstance(each, ListType) and each.max_length is None and (each.min_length or 0) <= 1
        for each in lists
    )


def _cut_list(text: bytes) -> Iterator[bytes]:
    """Yield a list in JSON as one list or several, which have its elements together."""
    if b'"' in text or b"{" in text or b"[" in text[1:]:
        elements = _RAWS.decode(text)
        each = max(1, len(elements) * _PIECE // len(text))
        for first in range(0, len(elements), each):
            yield b"[%b]" % b",".join(elements[first : first + each])
        return
    begin, end = 1, len(text) - 1  # numbers: any comma ends one
    while end - begin > _PIECE and (comma := text.find(b",", begin + _PIECE, end)) >= 0:
        yield b"[%b]" % text[begin:comma]
        begin = comma + 1
    yield b"[%b]" % text[begin:end]
