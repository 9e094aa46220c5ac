"""Has a converted SentencePiece tokenizer read texts that begin with spaces as SentencePiece does.

SentencePiece puts a space in front of every text. `transformers` 5 converts that into a
`Metaspace`, which puts none in front of a text that begins with one, so `a` and ` a` are the same
tokens. Two of them in a row do what is meant: spaces are written as `▁` before, so the first one
finds no text that begins with its own sign, a space, and puts one in front; the second one writes
that as `▁` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.whole_files import read_file

_SIGN: Final = "\u2581"
_PIECE, _NORMALIZER = 1, 3  # fields of ModelProto in https://github.com/google/sentencepiece
_ADDS_SPACE: Final = 3  # of its NormalizerSpec: add_dummy_prefix, true unless it is given
_REMOVES_SPACES: Final = 4  # remove_extra_whitespaces, likewise
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # protobuf's ways to write a field


def mend_leading_spaces(content: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """Return a tokenizer.json whose leading spaces are read as the SentencePiece file says.

    It is returned as it is where the file is none, puts no space in front or removes leading ones,
    and where spaces are not a `Metaspace`'s.
    """
    found = dict(content)
    first = _only(content.get("pre_tokenizer"), "pretokenizers")
    if not (first.get("type") == "Metaspace" and first.get("replacement") == _SIGN):
        return found
    if first.get("prepend_scheme") not in ("first", "always") or not keeps_leading(model):
        return found
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SIGN}
    before = content.get("normalizer")
    if _only(before, "normalizers") != spaces:
        several = [before, spaces] if before else [spaces]
        found["normalizer"] = {"type": "Sequence", "normalizers": several}
    second = {**first, "prepend_scheme": "never"}
    steps = [{**first, "replacement": " "}, second]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return found


def keeps_leading(model: Path) -> bool:
    """Return whether a SentencePiece file puts a space in front of texts that begin with some."""
    settings, pieces = {_ADDS_SPACE: 1, _REMOVES_SPACES: 1}, 0
    try:
        for field, value in _read_fields(read_file(model)):
            pieces += field == _PIECE
            if field == _NORMALIZER and isinstance(value, bytes):
                settings |= {
                    each: number
                    for each, number in _read_fields(value)
                    if isinstance(number, int) and each in settings
                }
    except (IndexError, ValueError):
        return False  # not a SentencePiece file
    return bool(pieces and settings[_ADDS_SPACE] and not settings[_REMOVES_SPACES])


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
