"""NVFP4: e2m1 numbers with a scale for every 16 inputs, and a factor for the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind


def read_nvfp4(planes: Mapping[str, Array]) -> Codes:
    """Scales are e4m3 numbers, exact in float16."""
    codes = np.ascontiguousarray(planes["codes"])
    numbers = {
        "unit": np.full((len(codes), 1), planes["unit"][0], np.float32),
        "steps": planes["steps"].reshape(len(codes), -1, 2),
    }
    return Codes(codes, numbers)


NVFP4: Final = StoredKind(
    Kind(
        "nvfp4",
        4,
        scale=("unit", "steps"),
        span_head=(Field("unit", "f4"),),
        head=(Field("steps", "f2", parts=2),),
        span=-1,
        table=tuple(map(int, HALVES_OF_E2M1)),
    ),
    read_nvfp4,
)
