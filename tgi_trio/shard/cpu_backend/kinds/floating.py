"""Codes that are floating-point numbers, or indices of some: bitsandbytes' NF4 and FP4, MXFP4 of
safetensors, and FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind

_HEAD: Final = (Field("scale", "f4"),)


def read_table(planes: Mapping[str, Array]) -> Codes:
    """Codes of 4 bits with one table for all; nested scales have been resolved already."""
    codes, table = planes["codes"], np.ascontiguousarray(planes["table"], np.float32)
    numbers = {"scale": planes["scales"].reshape(len(codes), -1)}
    return Codes(np.ascontiguousarray(codes), numbers, table)


def read_e4m3(planes: Mapping[str, Array]) -> Codes:
    """Codes of 8 bits; scales are [out, blocks], whether per block, output or tensor."""
    codes = np.ascontiguousarray(planes["codes"]).view(np.uint8)
    return Codes(codes, {"scale": planes["scales"].reshape(len(codes), -1)})


TABLE: Final = StoredKind(
    Kind("table", 4, scale=("scale",), span_head=_HEAD, head=(), floating="table"), read_table
)
E2M1: Final = StoredKind(
    Kind(
        "e2m1",
        4,
        scale=("scale",),
        span_head=_HEAD,
        head=(),
        floating="table",
        numbers=tuple(map(float, HALVES_OF_E2M1 / 2)),
    ),
    read_table,
)
E4M3: Final = StoredKind(
    Kind("e4m3", 8, scale=("scale",), span_head=_HEAD, head=(), floating="e4m3"), read_e4m3
)
