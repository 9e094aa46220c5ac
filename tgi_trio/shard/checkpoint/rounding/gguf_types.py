"""Rounding to GGUF's blocks as llama.cpp's own reference does: from float32 to bytes.

Every function takes blocks [count, weights], float32, and returns their bytes [count, bytes]. Tests
compare all but Q4_K with the reference bit by bit. The Python reference has no rounding for Q4_K:
the format leaves it to the writer how scale and low are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import Floats

Bytes = NDArray[np.uint8]
Encode = Callable[[Floats], Bytes]


def _halves(values: Floats) -> Bytes:
    """Return the bytes [count, 2 n] of float16 [count, n]."""
    return np.ascontiguousarray(values, "<f2").view(np.uint8)


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, with 0 for 0."""
    inverse: Floats = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse


def _low_then_high(codes: Bytes) -> Bytes:
    """Return [..., n] bytes of codes [..., 2 n], the first half in the low nibbles."""
    half = codes.shape[-1] // 2
    return np.asarray((codes[..., :half] & 15) | (codes[..., half:] << 4), np.uint8)


def _signed(blocks: Floats, zero: int) -> tuple[Floats, Bytes]:
    """Return scales [count, 1] and codes; the weight furthest from zero becomes code 0."""
    furthest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(blocks, furthest, axis=1) / np.float32(-zero)
    codes = np.trunc(blocks * _inverse(scale) + np.float32(zero + 0.5))
    return scale, np.minimum(codes, 2 * zero - 1).astype(np.uint8)


def _ranged(blocks: Floats, most: int) -> tuple[Floats, Floats, Bytes]:
    """Return scales, smallest weights [count, 1] and codes from 0 to `most`."""
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = (high - low) / np.float32(most)
    codes = np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5))
    return scale, low, np.minimum(codes, most).astype(np.uint8)


def _fifth(codes: Bytes) -> Bytes:
    """Return the fifth bits of codes [count, 32] as [count, 4] bytes."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def q4_0(blocks: Floats) -> Bytes:
    scale, codes = _signed(blocks, 8)
    return np.hstack([_halves(scale), _low_then_high(codes)])


def q4_1(blocks: Floats) -> Bytes:
    scale, low, codes = _ranged(blocks, 15)
    return np.hstack([_halves(scale), _halves(low), _low_then_high(codes)])


def q5_0(blocks: Floats) -> Bytes:
    scale, codes = _signed(blocks, 16)
    return np.hstack([_halves(scale), _fifth(codes), _low_then_high(codes)])


def q5_1(blocks: Floats) -> Bytes:
    scale, low, codes = _ranged(blocks, 31)
    return np.hstack([_halves(scale), _halves(low), _fifth(codes), _low_then_high(codes)])


def q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    exact = blocks * _inverse(scale)
    codes = np.trunc(exact + np.copysign(np.float32(0.5), exact)).astype(np.int8)
    return np.hstack([_halves(scale), codes.view(np.uint8)])


# factors of the range that are tried: cutting outliers may lower the total error
_SHRINKS: Final = (1.0, 0.93, 0.87)


def q4_k(blocks: Floats) -> Bytes:
    """Eight groups of 32 with a scale and a low of 6 bits each, which are scaled in turn."""
    groups = blocks.reshape(-1, 8, 32)
    scales, lows = _fit_groups(groups)
    unit = scales.max(axis=1, keepdims=True) / np.float32(63)
    least = lows.max(axis=1, keepdims=True) / np.float32(63)
    whole = np.rint(scales * _inverse(unit)).astype(np.uint8)
    whole_lows = np.rint(lows * _inverse(least)).astype(np.uint8)
    step = unit.astype(np.float16).astype(np.float32) * whole
    low = least.astype(np.float16).astype(np.float32) * whole_lows
    codes = np.rint((groups + low[..., None]) * _inverse(step)[..., None])
    codes = np.clip(codes, 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 64)
    return np.hstack(
        [
            _halves(unit),
            _halves(least),
            _six_bits(whole, whole_lows),
            _low_then_high(pairs).reshape(-1, 128),
        ]
    )


def _fit_groups(groups: Floats) -> tuple[Floats, Floats]:
    """Return scales and lows [count, 8], neither below 0: weight = scale * code - low.

    For several ranges codes are computed, then the least-squares line through weights and codes.
    """
    best: Floats | None = None
    scales = lows = np.zeros(groups.shape[:2], np.float32)
    bottom = np.minimum(groups.min(axis=2), 0)
    top = groups.max(axis=2)
    for shrink in _SHRINKS:
        scale = (top - bottom) * np.float32(shrink / 15)
        low = -bottom * np.float32(shrink)
        codes = np.rint((groups + low[..., None]) * _inverse(scale)[..., None])
        np.clip(codes, 0, 15, out=codes)
        scale, low = _line(codes, groups, scale, low)
        error = np.square(scale[..., None] * codes - low[..., None] - groups).sum(axis=2)
        if best is None:
            best, scales, lows = error, scale, low
            continue
        nearer = error < best
        best = np.where(nearer, error, best)
        scales, lows = np.where(nearer, scale, scales), np.where(nearer, low, lows)
    return scales, lows


def _line(codes: Floats, groups: Floats, scale: Floats, low: Floats) -> tuple[Floats, Floats]:
    """Return the least-squares scale and low for some codes; the given ones if there are none.

    A low below 0 becomes 0, with the least-squares scale for that.
    """
    count = np.float32(groups.shape[2])
    sums, products = codes.sum(axis=2), (codes * groups).sum(axis=2)
    squares, weights = np.square(codes).sum(axis=2), groups.sum(axis=2)
    spread = count * squares - sums * sums
    solvable = spread > 0
    safe = np.where(solvable, spread, 1)
    fitted = (count * products - sums * weights) / safe
    fitted_low = (sums * products - squares * weights) / safe
    through_zero = np.maximum(products / np.maximum(squares, 1), 0)
    negative = fitted_low < 0
    fitted = np.where(negative, through_zero, fitted)
    usable = solvable & (fitted >= 0)
    return (
        np.where(usable, fitted, scale).astype(np.float32),
        np.where(usable, np.maximum(fitted_low, 0), low).astype(np.float32),
    )


def _six_bits(scales: Bytes, lows: Bytes) -> Bytes:
    """Return 12 bytes with 8 scales and 8 lows, as `gguf_k_blocks.py` reads them."""
    first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    second = (lows[:, :4] & 63) | (lows[:, 4:] >> 4 << 6)
    third = (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4
    return np.hstack([first, second, third])


ENCODERS: Final[dict[str, Encode]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
}
