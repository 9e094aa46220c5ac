"""8-bit K and V in kernels: bytes in the formats of `--kv-cache-dtype`, as `KVCache` stores them.

All by integer operations, since devices before compute capability 8.9 have no instructions for
e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_like(codes, like, CODES: tl.constexpr):
    """Return bytes that were read as numbers of the dtype of `like`, exactly, without the scale.

    CODES: one of `kv_cache.EIGHT_BITS`, or "" if these are plain numbers.
    """
    if CODES == "":
        return codes
    elif CODES == "fp8_e5m2":  # the upper byte of a float16
        half = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        return half.to(tl.float32).to(like.dtype)
    else:  # as the bits of a float16 whose exponent is 8 too small
        tl.static_assert(CODES == "fp8_e4m3fn")
        wide = codes.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(like.dtype)


@triton.jit
def encode(x, scale, CODES: tl.constexpr):
    """Return the bytes nearest to float32 `x / scale`, ties to even; larger numbers saturate."""
    FRACTION: tl.constexpr = 2 if CODES == "fp8_e5m2" else 3  # bits
    LEAST: tl.constexpr = -14 if CODES == "fp8_e5m2" else -6  # exponent
    MOST: tl.constexpr = 57344.0 if CODES == "fp8_e5m2" else 448.0
    exact = x / scale
    size = tl.minimum(tl.abs(exact), MOST)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, LEAST)
    finest = ((127 + FRACTION - exponent) << 23).to(tl.float32, bitcast=True)
    steps = (size * finest + 8388608.0) - 8388608.0  # 2 ** 23: rounds to whole steps
    code = ((exponent - LEAST) << FRACTION) + steps.to(tl.int32)
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def store_number(at, x, scale, like, mask, CODES: tl.constexpr):
    """Store float32 `x`, rounded to the dtype that `like` points to, in the cache's format."""
    x = x.to(like.dtype.element_ty)
    if CODES == "":
        tl.store(at, x, mask=mask)
    else:
        tl.store(at, encode(x.to(tl.float32), scale, CODES), mask=mask)
