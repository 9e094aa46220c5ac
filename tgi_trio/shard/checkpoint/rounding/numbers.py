"""Rounding to integers, small floating-point numbers, and tables: the planes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.int8 import to_int8
from tgi_trio.shard.checkpoint.numbers import Floats

Planes = dict[str, NDArray[Any]]

# Quantiles of a normal distribution, including 0 (Dettmers and others 2023, arXiv 2305.14314).
NF4: Final[Floats] = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
# One sign bit, two exponent bits, one fraction bit, in bitsandbytes' order.
FP4: Final[Floats] = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4_BOTH: Final[Floats] = np.concatenate([FP4, -FP4])


def whole_rows(values: Floats, group: int) -> Planes:
    """int8 codes with a scale for each row."""
    codes, scales = to_int8(values)
    return {"codes": codes, "scales": scales[:, None]}


def float8(values: Floats, group: int) -> Planes:
    """e4m3 codes with a scale for each row."""
    scales = _scales(values, 448)
    return {"codes": nearest_e4m3(values / scales), "scales": scales}


def nearest_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Return codes of the nearest numbers in `E4M3_NUMBERS`, ties to even.

    Numbers beyond 448 become 448.
    """
    size = np.minimum(np.abs(values), np.float32(448))
    exponent = np.maximum(np.frexp(size)[1], -5) * (size > 0) - 5 * (size == 0)
    step = np.ldexp(np.float32(1), exponent - 4)  # the spacing of numbers of this size
    fractions = np.rint(size / step)  # 8 to 16; less for subnormal numbers
    # The codes of successive exponents are contiguous, so a carry needs no special treatment.
    codes = fractions.astype(np.int32) + (exponent + 5) * 8
    signed: NDArray[np.uint8] = (codes | np.signbit(values) * 128).astype(np.uint8)
    return signed


def four_bits(values: Floats, group: int) -> Planes:
    """Codes of 4 bits, with a float16 scale and an integer zero point for each group."""
    runs = values.reshape(len(values), -1, group)
    low, high = np.minimum(runs.min(axis=2), 0), np.maximum(runs.max(axis=2), 0)
    scales = np.maximum((high - low) / 15, np.finfo(np.float16).tiny)
    scales = scales.astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    codes = np.clip(np.rint(runs / scales[..., None]) + zeros[..., None], 0, 15)
    return {
        "codes": codes.astype(np.uint8).reshape(values.shape),
        "scales": scales,
        "zeros": zeros.astype(np.uint8),
    }


def round_to_table(table: Floats, values: Floats, group: int) -> Planes:
    """Codes of the nearest numbers in a table, with the largest weight of each group as scale."""
    runs = values.reshape(len(values), -1, group)
    scales = np.abs(runs).max(axis=2)
    order = np.argsort(table, kind="stable")
    between = (table[order][1:] + table[order][:-1]) / 2
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    places = np.searchsorted(between, (runs * inverse[..., None]).reshape(values.shape))
    return {"codes": order.astype(np.uint8)[places], "scales": scales}


def affine(planes: Mapping[str, NDArray[Any]]) -> Floats:
    """Return scale * (number - zero), where numbers are codes or their values in a table."""
    codes, scales = planes["codes"], planes["scales"]
    table = planes.get("table")
    numbers = codes.astype(np.float32) if table is None else table[codes]
    runs = numbers.reshape(*scales.shape, -1)
    if "zeros" in planes:
        runs = runs - planes["zeros"][..., None]
    values: Floats = (runs * scales[..., None]).reshape(codes.shape)
    return values


def of_float8(planes: Mapping[str, NDArray[Any]]) -> Floats:
    values: Floats = E4M3_NUMBERS[planes["codes"]] * planes["scales"]
    return values


def _scales(values: Floats, most: int) -> Floats:
    """Return scales [rows, 1] that map the largest weight to `most`, never 0."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    scales: Floats = np.maximum(largest / np.float32(most), np.finfo(np.float32).tiny)
    return scales
