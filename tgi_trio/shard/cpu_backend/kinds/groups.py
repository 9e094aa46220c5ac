"""Integers with a scale and a zero point or a low per group of inputs: GPTQ, AWQ, MLX, others.

The largest possible group is all inputs of an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind

_SIGN: Final = np.uint8(128)  # added to signed bytes to make them unsigned


def _kind(name: str, bits: int) -> Kind:
    """Return a kind with zero points; float16 and bfloat16 scales are exact in float32."""
    head = (Field("scale", "f4"), Field("zero", "u1"))
    return Kind(name, bits, scale=("scale",), low=("scale", "zero"), span_head=head, head=())


def read_groups(planes: Mapping[str, Array]) -> Codes:
    """Codes and zero points are unsigned bytes, or signed ones, which get 128 added."""
    codes, zeros = planes["codes"], planes.get("zeros")
    if codes.dtype == np.int8:
        codes = codes.view(np.uint8) ^ _SIGN
        zeros = None if zeros is None else zeros.view(np.uint8) ^ _SIGN
    numbers = {"scale": planes["scales"].reshape(len(codes), -1)}
    if zeros is not None:
        numbers["zero"] = zeros
    return Codes(np.ascontiguousarray(codes), numbers)


def read_lowered(planes: Mapping[str, Array]) -> Codes:
    """Lows are what is taken off, as in panels."""
    numbers = {"scale": planes["scales"], "low": planes["lows"]}
    return Codes(np.ascontiguousarray(planes["codes"]), numbers)


def _lowered(bits: int) -> StoredKind:
    head = (Field("scale", "f4"), Field("low", "f4"))
    name = f"{bits} bits in groups with lows"
    kind = Kind(name, bits, scale=("scale",), low=("low",), span_head=head, head=())
    return StoredKind(kind, read_lowered)


GROUPS_OF_2: Final = StoredKind(_kind("2 bits in groups", 2), read_groups)
GROUPS_OF_4: Final = StoredKind(_kind("4 bits in groups", 4), read_groups)
GROUPS_OF_8: Final = StoredKind(_kind("8 bits in groups", 8), read_groups)
SIGNED_8: Final = StoredKind(
    Kind(
        "int8",
        8,
        scale=("scale",),
        zero=128,
        span_head=(Field("scale", "f4"),),
        head=(),
    ),
    read_groups,
)
# `SIGNED_8` for a matrix unit that multiplies bytes.
SIGNED_BY_ROWS: Final = StoredKind(
    Kind(
        "int8 by rows",
        8,
        scale=("scale",),
        zero=128,
        span_head=(Field("scale", "f4"), Field("starts", "i4")),
        head=(),
        by_rows=True,
    ),
    read_groups,
)
# By the bits of a code in a panel.
LOWERED: Final = {bits: _lowered(bits) for bits in (4, 5, 6, 8)}
