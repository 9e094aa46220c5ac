"""GGUF's blocks of 256 ternary weights: TQ1_0 and TQ2_0, which are the same in panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.formats.gguf_ternary_blocks import codes_of_tq1_0, codes_of_tq2_0
from tgi_trio.shard.cpu_backend.kinds.kind import Array, Codes, Field, Kind, StoredKind

# What the code of 0 adds is subtracted as a low. As a zero code it would have to be 2 for VNNI's
# shifts, and TQ2_0 has room for a code of 3, which would then be 4.
_KIND: Final = Kind(
    "ternary", 2, scale=("d",), low=("d",), span_head=(Field("d", "f2"),), head=(), span=256
)


def _read(codes_of: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], planes: Array) -> Codes:
    """Return codes and scales from blocks [out, spans, bytes], whose last two are the scale."""
    codes = codes_of(planes.reshape(-1, planes.shape[-1])).reshape(len(planes), -1)
    halves = np.ascontiguousarray(planes[..., -2:]).view("<f2")[..., 0]
    return Codes(codes, {"d": halves})


def read_tq1_0(planes: Mapping[str, Array]) -> Codes:
    return _read(codes_of_tq1_0, planes["blocks"])


def read_tq2_0(planes: Mapping[str, Array]) -> Codes:
    return _read(codes_of_tq2_0, planes["blocks"])


TQ1_0: Final = StoredKind(_KIND, read_tq1_0)
TQ2_0: Final = StoredKind(_KIND, read_tq2_0)
