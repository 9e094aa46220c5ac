"""GGUF's blocks of 256 weights, whose scales are quantised too: Q2_K to Q6_K, IQ4_XS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.gguf_blocks import NONLINEAR, nibbles
from tgi_trio.shard.checkpoint.formats.gguf_k_blocks import (
    codes_of_q2_k,
    codes_of_q3_k,
    codes_of_q5_k,
    codes_of_q6_k,
    four_bits,
    scales_and_lows,
    scales_of_iq4_xs,
    scales_of_q3_k,
)
from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind

_SPAN: Final = 256


def _kind_with_lows(name: str, bits: int, *, parts: int = 1) -> Kind:
    return Kind(
        name,
        bits,
        scale=("d", "scales"),
        low=("least", "lows"),
        span_head=(Field("d", "f2"), Field("least", "f2")),
        head=(Field("scales", "u1", parts), Field("lows", "u1", parts)),
        span=_SPAN,
    )


def _halves(data: NDArray[np.uint8]) -> Array:
    """Return float16 [out, spans] from two bytes each, [out, spans, 2]."""
    return np.ascontiguousarray(data).view("<f2")[..., 0]


def _with_lows(blocks: NDArray[np.uint8], codes: NDArray[np.uint8]) -> Codes:
    """Return codes [out * spans, 8, 32] of Q4_K or Q5_K with their scales and lows."""
    outputs = len(blocks)
    scales, lows = scales_and_lows(blocks.reshape(-1, blocks.shape[-1])[:, 4:16])
    numbers = {
        "d": _halves(blocks[..., :2]),
        "least": _halves(blocks[..., 2:4]),
        "scales": scales.reshape(outputs, -1),
        "lows": lows.reshape(outputs, -1),
    }
    return Codes(codes.reshape(outputs, -1), numbers)


def read_q4_k(planes: Mapping[str, Array]) -> Codes:
    blocks = planes["blocks"]
    return _with_lows(blocks, four_bits(blocks.reshape(-1, 144)[:, 16:]))


def read_q5_k(planes: Mapping[str, Array]) -> Codes:
    blocks = planes["blocks"]
    return _with_lows(blocks, codes_of_q5_k(blocks.reshape(-1, 176)))


def read_q6_k(planes: Mapping[str, Array]) -> Codes:
    """The zero code is 32; every 16 inputs have a scale."""
    blocks = planes["blocks"]
    outputs = len(blocks)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(outputs, -1, 2)
    numbers = {"d": _halves(blocks[..., 208:]), "scales": scales}
    return Codes(codes_of_q6_k(blocks.reshape(-1, 210)).reshape(outputs, -1), numbers)


def read_q2_k(planes: Mapping[str, Array]) -> Codes:
    """Every 16 inputs have a scale and a low of 4 bits."""
    blocks = planes["blocks"]
    flat, outputs = blocks.reshape(-1, 84), len(blocks)
    packed = flat[:, :16]
    numbers = {
        "d": _halves(blocks[..., 80:82]),
        "least": _halves(blocks[..., 82:84]),
        "scales": (packed & np.uint8(15)).reshape(outputs, -1, 2),
        "lows": (packed >> np.uint8(4)).reshape(outputs, -1, 2),
    }
    return Codes(codes_of_q2_k(flat).reshape(outputs, -1), numbers)


def read_q3_k(planes: Mapping[str, Array]) -> Codes:
    """The zero code is 4; in panels codes have 4 bits, and the zero code is 8."""
    blocks = planes["blocks"]
    flat, outputs = blocks.reshape(-1, 110), len(blocks)
    scales = scales_of_q3_k(flat).reshape(outputs, -1, 2)
    numbers = {"d": _halves(blocks[..., 108:]), "scales": scales}
    return Codes(codes_of_q3_k(flat).reshape(outputs, -1) + np.uint8(4), numbers)


def read_iq4_xs(planes: Mapping[str, Array]) -> Codes:
    blocks = planes["blocks"]
    flat, outputs = blocks.reshape(-1, 136), len(blocks)
    numbers = {
        "d": _halves(blocks[..., :2]),
        "scales": scales_of_iq4_xs(flat).reshape(outputs, -1),
    }
    return Codes(nibbles(flat[:, 8:].reshape(-1, 8, 16)).reshape(outputs, -1), numbers)


def _kind_of_parts(name: str, bits: int, zero: int, largest: int) -> Kind:
    return Kind(
        name,
        bits,
        scale=("d", "scales"),
        zero=zero,
        span_head=(Field("d", "f2"),),
        head=(Field("scales", "i1", parts=2),),
        span=_SPAN,
        largest=largest,
    )


Q2_K: Final = StoredKind(_kind_with_lows("q2_k", 2, parts=2), read_q2_k)
Q3_K: Final = StoredKind(_kind_of_parts("q3_k", 4, zero=8, largest=11), read_q3_k)
IQ4_XS: Final = StoredKind(
    Kind(
        "iq4_xs",
        4,
        scale=("d", "scales"),
        span_head=(Field("d", "f2"),),
        head=(Field("scales", "i1"),),
        span=_SPAN,
        table=tuple(map(int, NONLINEAR)),
    ),
    read_iq4_xs,
)
Q4_K: Final = StoredKind(_kind_with_lows("q4_k", 4), read_q4_k)
Q5_K: Final = StoredKind(_kind_with_lows("q5_k", 5), read_q5_k)
Q6_K: Final = StoredKind(_kind_of_parts("q6_k", 6, zero=32, largest=63), read_q6_k)
