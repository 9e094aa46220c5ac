"""What is in a SentencePiece file: its pieces, and how it reads texts.

Numbers are those of ModelProto in https://github.com/google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tgi_trio.whole_files import read_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3  # of its SentencePiece
_MODEL, _SPACES_BEHIND, _BYTE_FALLBACK = 3, 24, 35  # of its TrainerSpec
_UNIGRAM, _PAIRS = 1, 2  # types of models
# Of its NormalizerSpec: precompiled_charsmap, add_dummy_prefix, remove_extra_whitespaces,
# escape_whitespaces. All but the first hold unless they are given.
_CHARACTERS, _ADDS_SPACE, _REMOVES_SPACES, _SIGNS_SPACES = 2, 3, 4, 5
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # protobuf's ways to write a field

_Fields = dict[int, bytes | int]


@dataclass(frozen=True, slots=True)
class PieceSettings:
    """What a SentencePiece file says of how it reads texts."""

    adds_space: bool = True  # in front of a text
    removes_spaces: bool = True  # at both ends, and all but one of several in a row
    characters: bytes = b""  # a table of those that are replaced by others; empty: none
    unknown: str | None = None  # the piece for characters that it does not know


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of a SentencePiece file; its id is its place."""

    text: str
    score: float  # of neighbours that become a piece, those of the highest do first
    kind: int


@dataclass(frozen=True, slots=True)
class PieceModel:
    """What a SentencePiece file has."""

    pieces: tuple[Piece, ...]
    settings: PieceSettings
    pairs: bool  # whether neighbours become pieces (BPE), not the likeliest pieces a text (Unigram)
    byte_fallback: bool  # unknown characters are read as their bytes
    plain_spaces: bool  # whether a space is written as U+2581, in front of words


def read_settings(file: Path) -> PieceSettings | None:
    """Return how a SentencePiece file reads texts; None if the file is none."""
    model = read_model(file)
    return None if model is None else model.settings


def read_model(file: Path) -> PieceModel | None:
    """Return what a SentencePiece file has; None if the file is none. Raises OSError."""
    pieces: list[Piece] = []
    trained: _Fields = {}
    reading: _Fields = {}
    try:
        for field, value in _read_fields(read_file(file)):
            if field == _PIECE and isinstance(value, bytes):
                pieces.append(_read_piece(dict(_read_fields(value))))
            elif field == _TRAINER and isinstance(value, bytes):
                trained = dict(_read_fields(value))
            elif field == _NORMALIZER and isinstance(value, bytes):
                reading = dict(_read_fields(value))
    except (IndexError, ValueError, struct.error):
        return None
    if not pieces:
        return None
    characters = reading.get(_CHARACTERS)
    settings = PieceSettings(
        adds_space=bool(reading.get(_ADDS_SPACE, 1)),
        removes_spaces=bool(reading.get(_REMOVES_SPACES, 1)),
        characters=characters if isinstance(characters, bytes) else b"",
        unknown=next((piece.text for piece in pieces if piece.kind == UNKNOWN), None),
    )
    return PieceModel(
        pieces=tuple(pieces),
        settings=settings,
        pairs=trained.get(_MODEL, _UNIGRAM) == _PAIRS,
        byte_fallback=bool(trained.get(_BYTE_FALLBACK, 0)),
        plain_spaces=bool(reading.get(_SIGNS_SPACES, 1)) and not trained.get(_SPACES_BEHIND, 0),
    )


def _read_piece(fields: _Fields) -> Piece:
    """Return a piece. Raises ValueError or struct.error for fields of other kinds."""
    text, score, kind = fields.get(_TEXT), fields.get(_SCORE, bytes(4)), fields.get(_KIND, NORMAL)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)):
        raise ValueError("a piece without a text, or with a score that is no number")
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


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
