"""GGUF's blocks of 32 weights, and its codebooks: from bytes to float32.

Every function takes blocks [count, bytes], uint8, and returns their weights [count, weights]. All
numbers are little-endian; "half" is float16. Tests compare each with llama.cpp's own reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import Floats

Bytes = NDArray[np.uint8]
Dequantise = Callable[[Bytes], Floats]

# The values of 4-bit codes.
NONLINEAR: Final[Floats] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
HALVES_OF_E2M1: Final[Floats] = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32
)


def half(data: Bytes) -> Floats:
    """Return float32 [count, n] from float16 [count, 2 n] bytes."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def nibbles(data: Bytes) -> Bytes:
    """Return the low nibbles of bytes [..., n], then the high ones: [..., 2 n]."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def fifth_bits(data: Bytes) -> Bytes:
    """Return 16 or 0 for each bit of [..., 4] bytes, lowest first: [..., 32]."""
    bits = np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def q4_0(blocks: Bytes) -> Floats:
    """Scale (half), codes; the zero code is 8."""
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: Bytes) -> Floats:
    """Scale, smallest weight (halves), codes."""
    return half(blocks[:, :2]) * nibbles(blocks[:, 4:]) + half(blocks[:, 2:4])


def q5_0(blocks: Bytes) -> Floats:
    """Scale (half), fifth bits, codes; the zero code is 16."""
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return half(blocks[:, :2]) * (codes.astype(np.float32) - 16)


def q5_1(blocks: Bytes) -> Floats:
    """Scale, smallest weight (halves), fifth bits, codes."""
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return half(blocks[:, :2]) * codes + half(blocks[:, 2:4])


def q8_0(blocks: Bytes) -> Floats:
    """Scale (half), int8."""
    return half(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def iq4_nl(blocks: Bytes) -> Floats:
    """Scale (half), codes with values in `NONLINEAR`."""
    return half(blocks[:, :2]) * NONLINEAR[nibbles(blocks[:, 2:])]


def mxfp4(blocks: Bytes) -> Floats:
    """Exponent of two; e2m1 codes."""
    return scales_of_mxfp4(blocks) * HALVES_OF_E2M1[nibbles(blocks[:, 1:])]


def scales_of_mxfp4(blocks: Bytes) -> Floats:
    """Return scales [count, 1]: 2^(exponent - 128), because the table's values are doubled."""
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


BLOCKS: Final[dict[str, Dequantise]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "IQ4_NL": iq4_nl,
    "MXFP4": mxfp4,
}
