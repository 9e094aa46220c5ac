"""K and V of 8 bits, as `KVCache` keeps them: bytes that are numbers of `--kv-cache-dtype`.

In integers throughout: devices before compute capability 8.9 have no instructions for e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_like(codes, like, CODES: tl.constexpr):
    """Return what was read as numbers of the dtype of `like`: exactly, but for the scale.

    CODES: one of `kv_cache.EIGHT_BITS`, or "" where these are numbers already.
    """
    if CODES == "":
        return codes
    elif CODES == "fp8_e5m2":  # the upper half of a float16
        half = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        return half.to(tl.float32).to(like.dtype)
    else:  # the bits of a float16, whose exponents are 8 less
        tl.static_assert(CODES == "fp8_e4m3fn")
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(like.dtype)


@triton.jit
def encode(x, scale, CODES: tl.constexpr):
    """Return the bytes nearest to float32 `x / scale`, ties to even; the largest of what is more.

    `scale`: what 1 stands for.
    """
    FRACTION: tl.constexpr = 2 if CODES == "fp8_e5m2" else 3  # bits
    LEAST: tl.constexpr = -14 if CODES == "fp8_e5m2" else -6  # exponent
    MOST: tl.constexpr = 57344.0 if CODES == "fp8_e5m2" else 448.0
    exact = x / scale
    size = tl.minimum(tl.abs(exact), MOST)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, LEAST)
    finest = ((127 + FRACTION - exponent) << 23).to(tl.float32, bitcast=True)
    steps = (size * finest + 8388608.0) - 8388608.0  # 2 ** 23: what is below 1 is rounded off
    code = ((exponent - LEAST) << FRACTION) + steps.to(tl.int32)
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def store_number(at, x, scale, like, mask, CODES: tl.constexpr):
    """Store float32 `x`, rounded to the dtype of what `like` points to, as the cache keeps it."""
    x = x.to(like.dtype.element_ty)
    if CODES == "":
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, encode(x.to(tl.float32), scale, CODES), mask=mask)
