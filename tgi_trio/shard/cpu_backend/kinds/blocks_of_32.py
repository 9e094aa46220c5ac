"""GGUF's blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; with tables, IQ4_NL and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.gguf_blocks import (
    HALVES_OF_E2M1,
    NONLINEAR,
    fifth_bits,
    nibbles,
)
from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind

_HEAD: Final = (Field("d", "f2"),)


def _codes(codes: Array, scales: NDArray[np.uint8]) -> Codes:
    """Return codes [out, blocks, 32] with their float16 scales, from bytes [out, blocks, 2]."""
    numbers = {"d": np.ascontiguousarray(scales).view("<f2")[..., 0]}
    return Codes(codes.reshape(len(codes), -1), numbers)


def read_q4_0(planes: Mapping[str, Array]) -> Codes:
    """The zero code is 8."""
    blocks = planes["blocks"]
    return _codes(nibbles(blocks[..., 2:]), blocks[..., :2])


def read_q5_0(planes: Mapping[str, Array]) -> Codes:
    """The zero code is 16."""
    blocks = planes["blocks"]
    codes = nibbles(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6])
    return _codes(codes, blocks[..., :2])


def read_q8_0(planes: Mapping[str, Array]) -> Codes:
    """Signed bytes are made unsigned: the zero code is 128."""
    blocks = planes["blocks"]
    return _codes(np.ascontiguousarray(blocks[..., 2:]) ^ np.uint8(128), blocks[..., :2])


def _with_lows(codes: Array, blocks: NDArray[np.uint8]) -> Codes:
    """Return codes as `_codes`, with the smallest weights, negated since they are subtracted."""
    found = _codes(codes, blocks[..., :2])
    least = np.ascontiguousarray(blocks[..., 2:4]).view("<f2")[..., 0]
    return Codes(found.codes, {**found.numbers, "low": -least})


def read_q4_1(planes: Mapping[str, Array]) -> Codes:
    blocks = planes["blocks"]
    return _with_lows(nibbles(blocks[..., 4:]), blocks)


def read_q5_1(planes: Mapping[str, Array]) -> Codes:
    blocks = planes["blocks"]
    return _with_lows(nibbles(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8]), blocks)


def read_mxfp4(planes: Mapping[str, Array]) -> Codes:
    """Numbers of the table are twice as large as e2m1's, so exponents are lowered by 1."""
    blocks = planes["blocks"]
    codes = nibbles(blocks[..., 1:]).reshape(len(blocks), -1)
    exponents = np.maximum(blocks[..., 0], 1) - np.uint8(1)
    return Codes(codes, {"exponent": exponents})


_WITH_LOWS: Final = (Field("d", "f2"), Field("low", "f2"))
Q4_0: Final = StoredKind(Kind("q4_0", 4, ("d",), _HEAD, zero=8), read_q4_0)
Q5_0: Final = StoredKind(Kind("q5_0", 5, ("d",), _HEAD, zero=16), read_q5_0)
Q8_0: Final = StoredKind(Kind("q8_0", 8, ("d",), _HEAD, zero=128), read_q8_0)
Q4_1: Final = StoredKind(Kind("q4_1", 4, ("d",), _WITH_LOWS, low=("low",)), read_q4_1)
Q5_1: Final = StoredKind(Kind("q5_1", 5, ("d",), _WITH_LOWS, low=("low",)), read_q5_1)
IQ4_NL: Final = StoredKind(
    Kind("iq4_nl", 4, ("d",), _HEAD, table=tuple(map(int, NONLINEAR))), read_q4_0
)
MXFP4: Final = StoredKind(
    Kind(
        "mxfp4",
        4,
        ("exponent",),
        (Field("exponent", "e8"),),
        table=tuple(map(int, HALVES_OF_E2M1)),
    ),
    read_mxfp4,
)
