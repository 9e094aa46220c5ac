"""Quantised matrices in a common form for generic kernels: codes, scales, lows, tables.

weight = scale * number - low, where number is the code, or its value in a table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf_blocks import (
    HALVES_OF_E2M1,
    NONLINEAR,
    fifth_bits,
    half,
    nibbles,
    scales_of_mxfp4,
)
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
from tgi_trio.shard.checkpoint.formats.gguf_ternary_blocks import codes_of_tq1_0, codes_of_tq2_0
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

_NO_NUMBER: Final = np.uint8(0x7F)  # NaN in e4m3, without the sign bit
Bytes = NDArray[np.uint8]
Planes = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Quantised scales or lows: integers times units that a block's groups share."""

    steps: NDArray[np.uint8] | NDArray[np.int8]  # [outputs, runs]
    units: Floats  # [outputs, blocks]


@dataclass(frozen=True, slots=True)
class UnpackedMatrix:
    """A matrix [outputs, inputs]; groups of inputs share scales and lows.

    Groups are contiguous and of one size unless there is an `order`.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]  # [outputs, inputs]
    scales: Floats  # [outputs, runs]
    lows: Floats | None = None  # shaped like the scales
    table: Floats | None = None
    # [inputs], the group of each, if groups are not contiguous or equal
    order: NDArray[np.int64] | None = None
    nested: NestedScales | None = None  # the quantised form of the scales
    nested_lows: NestedScales | None = None


def unpack_matrix(matrix: StoredMatrix) -> UnpackedMatrix | None:
    """Return a matrix in this form, or None if its format has no such form.

    Raises ModelLoadError as its `planes` do, and for a weight that is NaN.
    """
    found = UNPACKED_CODINGS.get(matrix.coding)
    if found is None:
        return None
    planes = matrix.planes()
    parts = found(planes)
    inputs, runs = parts.codes.shape[1], parts.scales.shape[1]
    if "codes" in planes and parts.order is None and runs > 1 and inputs % matrix.group:
        return replace(parts, order=np.arange(inputs) // matrix.group)  # the last group has fewer
    return parts


def _affine(planes: Planes) -> UnpackedMatrix:
    scales = np.asarray(planes["scales"], np.float32).reshape(len(planes["codes"]), -1)
    lows = None
    if "zeros" in planes:
        lows = scales * planes["zeros"].astype(np.float32)
    return UnpackedMatrix(planes["codes"], scales, lows, order=planes.get("groups"))


def _table(planes: Planes) -> UnpackedMatrix:
    return UnpackedMatrix(planes["codes"], planes["scales"], table=planes["table"])


def _lowered(planes: Planes) -> UnpackedMatrix:
    return UnpackedMatrix(planes["codes"], planes["scales"], planes["lows"])


def _nvfp4(planes: Planes) -> UnpackedMatrix:
    return UnpackedMatrix(planes["codes"], planes["steps"] * planes["unit"], table=HALVES_OF_E2M1)


def _e4m3(planes: Planes) -> UnpackedMatrix:
    codes = planes["codes"]
    if (codes & _NO_NUMBER == _NO_NUMBER).any():
        raise ModelLoadError("A weight of 8 bits is no number.")
    scales = np.asarray(planes["scales"], np.float32)
    return UnpackedMatrix(codes, scales, None, E4M3_NUMBERS, planes.get("groups"))


def _blocks(read: Callable[[Bytes], UnpackedMatrix]) -> Callable[[Planes], UnpackedMatrix]:
    """Return a reader of rows of blocks, from a reader of blocks [count, bytes]."""

    def read_rows(planes: Planes) -> UnpackedMatrix:
        blocks = planes["blocks"]
        parts = read(np.ascontiguousarray(blocks).reshape(-1, blocks.shape[-1]))
        rows = len(blocks)
        return replace(
            parts,
            codes=parts.codes.reshape(rows, -1),
            scales=parts.scales.reshape(rows, -1),
            lows=None if parts.lows is None else parts.lows.reshape(rows, -1),
            nested=_by_rows(parts.nested, rows),
            nested_lows=_by_rows(parts.nested_lows, rows),
        )

    return read_rows


def _by_rows(nested: NestedScales | None, rows: int) -> NestedScales | None:
    if nested is None:
        return None
    return NestedScales(nested.steps.reshape(rows, -1), nested.units.reshape(rows, -1))


def _q4_0(blocks: Bytes) -> UnpackedMatrix:
    scales = half(blocks[:, :2])
    return UnpackedMatrix(nibbles(blocks[:, 2:]), scales, scales * 8)


def _q4_1(blocks: Bytes) -> UnpackedMatrix:
    return UnpackedMatrix(nibbles(blocks[:, 4:]), half(blocks[:, :2]), -half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> UnpackedMatrix:
    scales = half(blocks[:, :2])
    return UnpackedMatrix(nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6]), scales, scales * 16)


def _q5_1(blocks: Bytes) -> UnpackedMatrix:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return UnpackedMatrix(codes, half(blocks[:, :2]), -half(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> UnpackedMatrix:
    return UnpackedMatrix(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), half(blocks[:, :2]))


def _iq4_nl(blocks: Bytes) -> UnpackedMatrix:
    return UnpackedMatrix(nibbles(blocks[:, 2:]), half(blocks[:, :2]), table=NONLINEAR)


def _mxfp4(blocks: Bytes) -> UnpackedMatrix:
    return UnpackedMatrix(nibbles(blocks[:, 1:]), scales_of_mxfp4(blocks), table=HALVES_OF_E2M1)


def _q2_k(blocks: Bytes) -> UnpackedMatrix:
    units = half(blocks[:, 80:84])
    scales: Bytes = np.bitwise_and(blocks[:, :16], 15, dtype=np.uint8)
    lows: Bytes = np.right_shift(blocks[:, :16], 4, dtype=np.uint8)
    return _with_lows(codes_of_q2_k(blocks), units, scales, lows)


def _q3_k(blocks: Bytes) -> UnpackedMatrix:
    unit, steps = half(blocks[:, 108:]), scales_of_q3_k(blocks)
    scales = unit * steps
    return UnpackedMatrix(
        codes_of_q3_k(blocks), scales, scales * 4, nested=NestedScales(steps, unit)
    )


def _q4_k(blocks: Bytes) -> UnpackedMatrix:
    scales_lows = scales_and_lows(blocks[:, 4:16])
    return _with_lows(four_bits(blocks[:, 16:]), half(blocks[:, :4]), *scales_lows)


def _q5_k(blocks: Bytes) -> UnpackedMatrix:
    scales_lows = scales_and_lows(blocks[:, 4:16])
    return _with_lows(codes_of_q5_k(blocks), half(blocks[:, :4]), *scales_lows)


def _with_lows(codes: Bytes, units: Floats, scales: Bytes, lows: Bytes) -> UnpackedMatrix:
    """Return blocks with integer scales and lows [count, groups], in units [count, 2]."""
    first, second = units[:, :1], units[:, 1:]
    nested, nested_lows = NestedScales(scales, first), NestedScales(lows, second)
    return UnpackedMatrix(
        codes, first * scales, second * lows, nested=nested, nested_lows=nested_lows
    )


def _q6_k(blocks: Bytes) -> UnpackedMatrix:
    unit, steps = half(blocks[:, 208:]), blocks[:, 192:208].view(np.int8)
    scales = unit * steps
    return UnpackedMatrix(
        codes_of_q6_k(blocks), scales, scales * 32, nested=NestedScales(steps, unit)
    )


def _iq4_xs(blocks: Bytes) -> UnpackedMatrix:
    unit, steps = half(blocks[:, :2]), scales_of_iq4_xs(blocks)
    codes = nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return UnpackedMatrix(codes, unit * steps, table=NONLINEAR, nested=NestedScales(steps, unit))


def _tq1_0(blocks: Bytes) -> UnpackedMatrix:
    scales = half(blocks[:, 52:])
    return UnpackedMatrix(codes_of_tq1_0(blocks), scales, scales)


def _tq2_0(blocks: Bytes) -> UnpackedMatrix:
    scales = half(blocks[:, 64:])
    return UnpackedMatrix(codes_of_tq2_0(blocks), scales, scales)


UNPACKED_CODINGS: Final[Mapping[str, Callable[[Planes], UnpackedMatrix]]] = {
    "affine": _affine,
    "affine in any order": _affine,
    "int8": _affine,
    "lowered": _lowered,
    "table": _table,
    "e4m3": _e4m3,
    "nvfp4": _nvfp4,
    "Q4_0": _blocks(_q4_0),
    "Q4_1": _blocks(_q4_1),
    "Q5_0": _blocks(_q5_0),
    "Q5_1": _blocks(_q5_1),
    "Q8_0": _blocks(_q8_0),
    "IQ4_NL": _blocks(_iq4_nl),
    "MXFP4": _blocks(_mxfp4),
    "Q2_K": _blocks(_q2_k),
    "Q3_K": _blocks(_q3_k),
    "Q4_K": _blocks(_q4_k),
    "Q5_K": _blocks(_q5_k),
    "Q6_K": _blocks(_q6_k),
    "IQ4_XS": _blocks(_iq4_xs),
    "TQ1_0": _blocks(_tq1_0),
    "TQ2_0": _blocks(_tq2_0),
}
