"""EXL3: trellis codes of 1 to 8 bits, whose numbers are multiplied with turned activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import numpy as np

from tgi_trio.model.quantised.exl3_layout import TURNED
from tgi_trio.shard.cpu_backend.kinds.kind import (
    CODEBOOKS,
    Array,
    Codes,
    Field,
    Floating,
    Kind,
    StoredKind,
)


def read_trellis(planes: Mapping[str, Array]) -> Codes:
    """What all outputs are scaled by is that of both transforms; what else there is, is theirs."""
    codes = planes["codes"]
    return Codes(codes, {"scale": np.full((len(codes), 1), 1 / TURNED, np.float32)})


def _kind(codebook: str, bits: int) -> StoredKind:
    kind = Kind(
        f"{codebook} of {bits} bits",
        bits,
        scale=("scale",),
        span_head=(Field("scale", "f4"),),
        head=(),
        span=-1,
        floating=cast(Floating, codebook),
    )
    return StoredKind(kind, read_trellis)


# By `StoredMatrix.coding` and bits.
TRELLIS: Final = {
    f"{codebook} {bits}": _kind(codebook, bits) for codebook in CODEBOOKS for bits in range(1, 9)
}
