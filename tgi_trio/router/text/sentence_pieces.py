"""Has a converted SentencePiece tokenizer read texts as SentencePiece does.

`transformers` 5 converts Llama's tokenizers without a look at what their files say of texts:
whether a space is put in front, whether spaces are removed, which characters become others.

Nor is a space in front what SentencePiece means by it. It puts one before every text. A `Metaspace`
puts none in front of a text that begins with one, so `a` and ` a` are the same tokens. Two of them
in a row do what is meant: spaces are written as `▁` before, so the first one finds no text that
begins with its own sign, a space, and puts one in front; the second one writes that as `▁` as well.
Where spaces are removed, a single one stays at the beginning, in place of that in front.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.whole_files import read_file

Json = dict[str, Any]

_SIGN: Final = "\u2581"
_PIECE, _NORMALIZER = 1, 3  # fields of ModelProto in https://github.com/google/sentencepiece
_TEXT, _KIND = 1, 3  # of its SentencePiece
_UNKNOWN: Final = 2  # a kind
# Of its NormalizerSpec: precompiled_charsmap, add_dummy_prefix, remove_extra_whitespaces. The
# second and the third hold unless they are given.
_CHARACTERS, _ADDS_SPACE, _REMOVES_SPACES = 2, 3, 4
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # protobuf's ways to write a field


@dataclass(frozen=True, slots=True)
class PieceSettings:
    """What a SentencePiece file says of how it reads texts."""

    adds_space: bool = True  # in front of a text
    removes_spaces: bool = True  # at both ends, and all but one of several in a row
    characters: bytes = b""  # a table of those that are replaced by others; empty: none
    unknown: str | None = None  # the piece for characters that it does not know


def read_settings(model: Path) -> PieceSettings | None:
    """Return what a SentencePiece file says; None if the file is none."""
    characters, unknown = b"", None
    settings, pieces = {_ADDS_SPACE: 1, _REMOVES_SPACES: 1}, 0
    try:
        for field, value in _read_fields(read_file(model)):
            if field == _PIECE and isinstance(value, bytes):
                pieces += 1
                if unknown is None:
                    piece = dict(_read_fields(value))
                    text = piece.get(_TEXT)
                    if piece.get(_KIND) == _UNKNOWN and isinstance(text, bytes):
                        unknown = text.decode()
            elif field == _NORMALIZER and isinstance(value, bytes):
                for each, said in _read_fields(value):
                    if isinstance(said, int):
                        settings[each] = said
                    elif each == _CHARACTERS:
                        characters = said
    except (IndexError, ValueError):
        return None
    if not pieces:
        return None
    adds, removes = bool(settings[_ADDS_SPACE]), bool(settings[_REMOVES_SPACES])
    return PieceSettings(adds, removes, characters, unknown)


def mend_conversion(content: Mapping[str, Any], model: Path) -> Json:
    """Return a tokenizer.json that reads texts as the SentencePiece file says.

    It is returned as it is where the file is none, and where spaces are not a `Metaspace`'s that
    puts one in front. Conversions with a normalizer of their own, as those of T5, follow the file
    but for the space in front.
    """
    found = dict(content)
    first = _only(content.get("pre_tokenizer"), "pretokenizers")
    if not (first.get("type") == "Metaspace" and first.get("replacement") == _SIGN):
        return found
    settings = read_settings(model)
    if first.get("prepend_scheme") not in ("first", "always") or settings is None:
        return found
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SIGN}
    own: Any = content.get("normalizer")
    follows = bool(own) and _only(own, "normalizers") != spaces
    if follows and (settings.removes_spaces or not settings.adds_space):
        return found
    steps: list[Json] = [own] if follows else []
    if settings.characters and not follows:
        table = b64encode(settings.characters).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if settings.removes_spaces:
        steps += [_replace(" {2,}", " "), _replace(rf"[ {_SIGN}]+\z", "")]
    if settings.adds_space:
        # A single one at the beginning takes the place of that in front.
        steps += [] if settings.removes_spaces else [spaces]
        twice = [{**first, "replacement": " "}, {**first, "prepend_scheme": "never"}]
        found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": twice}
    else:
        steps += [_replace(r"\A +", "")] if settings.removes_spaces else []
        found["pre_tokenizer"] = {**first, "prepend_scheme": "never"}
        found["decoder"] = _without_strip(content.get("decoder"))
    found["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    given = content.get("model") or {}
    if given.get("unk_token") is None and settings.unknown in given.get("vocab", ()):
        # Without one, characters that it does not know would be no tokens at all.
        found["model"] = {**given, "unk_token": settings.unknown}
    return found


def _replace(expression: str, text: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": text}


def _without_strip(decoder: Any) -> Any:
    """Return a decoder that leaves the first space of a text."""
    if not isinstance(decoder, Mapping) or decoder.get("type") != "Sequence":
        return decoder
    kept = [each for each in decoder["decoders"] if each.get("type") != "Strip"]
    return {**decoder, "decoders": kept}


def _only(step: Any, name: str) -> Mapping[str, Any]:
    """Return a step of a tokenizer.json, or the one in a sequence of one."""
    while isinstance(step, Mapping) and step.get("type") == "Sequence" and len(step[name]) == 1:
        step = step[name][0]
    return step if isinstance(step, Mapping) else {}


def _read_fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a protobuf message.

    Raises IndexError or ValueError for what is none.
    """
    at = 0
    while at < len(data):
        key, at = _read_number(data, at)
        field, way = key >> 3, key & 7
        if way == _NUMBER:
            number, at = _read_number(data, at)
            yield field, number
            continue
        if way == _BYTES:
            length, at = _read_number(data, at)
        elif way in (_EIGHT, _FOUR):
            length = 8 if way == _EIGHT else 4
        else:
            raise ValueError(f"protobuf has no way {way} to write a field")
        if at + length > len(data):
            raise IndexError("a field ends behind the message")
        yield field, data[at : at + length]
        at += length


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits to a byte, and the place behind it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
