"""GGUF's blocks of 256 weights, whose scales are quantised too: from bytes to float32.

Functions are as in `gguf_blocks.py`. A block has 8 groups of 32 weights or 16 of 16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.gguf_blocks import (
    NONLINEAR,
    Bytes,
    Dequantise,
    half,
    nibbles,
)
from tgi_trio.shard.checkpoint.numbers import Floats

_PAIRS: Final[Bytes] = np.array([0, 2, 4, 6], np.uint8)  # shifts of the 2-bit pairs in a byte
_BITS: Final[Bytes] = np.arange(8, dtype=np.uint8)


def _weights(scales: Floats, codes: Bytes | Floats, lows: Floats | None = None) -> Floats:
    """Return scale * code - low for codes [count, groups, size]; the others are [count, groups]."""
    values = scales[..., None] * codes
    if lows is not None:
        values -= lows[..., None]
    return np.ascontiguousarray(values.reshape(len(values), -1), np.float32)


def scales_and_lows(data: Bytes) -> tuple[Bytes, Bytes]:
    """Return the 8 scales and the 8 lows of 6 bits in 12 bytes, [count, 8] each."""
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    lows = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, lows


def four_bits(data: Bytes) -> Bytes:
    """Return codes [count, 8, 32] from 128 bytes: of each 32 low nibbles, then high ones."""
    return nibbles(data.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def two_bits(data: Bytes) -> Bytes:
    """Return codes [count, 8, 32] from 64 bytes: per 32 bytes the lowest pairs, then the next."""
    pairs: Bytes = np.right_shift(data.reshape(-1, 2, 1, 32), _PAIRS[:, None])
    return np.bitwise_and(pairs, 3, dtype=np.uint8).reshape(-1, 8, 32)


def q2_k(blocks: Bytes) -> Floats:
    """16 bytes of 4-bit scale and low; codes; scales of the scales and of the lows."""
    packed, unit = blocks[:, :16], half(blocks[:, 80:84])
    codes = codes_of_q2_k(blocks).reshape(-1, 16, 16)
    return _weights(unit[:, :1] * (packed & 15), codes, unit[:, 1:] * (packed >> 4))


def codes_of_q2_k(blocks: Bytes) -> Bytes:
    """Return 2-bit codes [count, 8, 32]."""
    return two_bits(blocks[:, 16:80])


def q3_k(blocks: Bytes) -> Floats:
    """Third bits (without one the code is 4 less), codes, 16 scales of 6 bits, their scale."""
    codes = codes_of_q3_k(blocks).reshape(-1, 16, 16)
    scales = half(blocks[:, 108:]) * scales_of_q3_k(blocks)
    return _weights(scales, codes.astype(np.float32) - 4)


def codes_of_q3_k(blocks: Bytes) -> Bytes:
    """Return 3-bit codes [count, 8, 32]."""
    third = blocks[:, None, :32] >> _BITS[:, None] & 1
    return np.asarray(two_bits(blocks[:, 32:96]) | third << 2, np.uint8)


def scales_of_q3_k(blocks: Bytes) -> NDArray[np.int8]:
    """Return scales [count, 16] from -32 to 31."""
    packed = blocks[:, 96:108]
    high = (packed[:, None, 8:] >> _PAIRS[:, None] & 3).reshape(-1, 16)
    return (nibbles(packed[:, :8]) | high << 4).astype(np.int8) - np.int8(32)


def q4_k(blocks: Bytes) -> Floats:
    """Scales of the scales and of the lows, 8 of each in 6 bits, codes."""
    unit, (scales, lows) = half(blocks[:, :4]), scales_and_lows(blocks[:, 4:16])
    return _weights(unit[:, :1] * scales, four_bits(blocks[:, 16:]), unit[:, 1:] * lows)


def q5_k(blocks: Bytes) -> Floats:
    """As `q4_k`, with fifth bits before the codes: bit g of a byte belongs to group g."""
    unit, (scales, lows) = half(blocks[:, :4]), scales_and_lows(blocks[:, 4:16])
    return _weights(unit[:, :1] * scales, codes_of_q5_k(blocks), unit[:, 1:] * lows)


def codes_of_q5_k(blocks: Bytes) -> Bytes:
    """Return 5-bit codes [count, 8, 32]."""
    fifth = blocks[:, None, 16:48] >> _BITS[:, None] & 1
    return np.asarray(four_bits(blocks[:, 48:]) | fifth << 4, np.uint8)


def q6_k(blocks: Bytes) -> Floats:
    """Low four bits, upper two, 16 scales (int8), their scale; the zero code is 32."""
    codes = codes_of_q6_k(blocks).reshape(-1, 16, 16)
    scales = half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return _weights(scales, codes.astype(np.float32) - 32)


def codes_of_q6_k(blocks: Bytes) -> Bytes:
    """Return 6-bit codes [count, 8, 32]."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    return np.asarray(low | two_bits(blocks[:, 128:192]) << 4, np.uint8)


def q8_k(blocks: Bytes) -> Floats:
    """Scale (float32), int8 codes, and sums of these, which only products need."""
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return _weights(scales, blocks[:, None, 4:260].view(np.int8).astype(np.float32))


def iq4_xs(blocks: Bytes) -> Floats:
    """Scale of the scales; 8 scales of 6 bits, upper two first; codes index `NONLINEAR`."""
    codes = nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return _weights(half(blocks[:, :2]) * scales_of_iq4_xs(blocks), NONLINEAR[codes])


def scales_of_iq4_xs(blocks: Bytes) -> NDArray[np.int8]:
    """Return scales [count, 8] from -32 to 31."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> 2 * np.arange(8, dtype=np.uint16)
    packed = blocks[:, 4:8]
    lower = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 8)
    return np.asarray((lower | (upper & 3) << 4).astype(np.int8) - np.int8(32), np.int8)


K_BLOCKS: Final[dict[str, Dequantise]] = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_K": q8_k,
    "IQ4_XS": iq4_xs,
}
