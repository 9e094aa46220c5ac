"""The kind of a matrix's weights, by the name that its format gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.cpu_backend.kinds.blocks_of_32 import (
    IQ4_NL,
    MXFP4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
)
from tgi_trio.shard.cpu_backend.kinds.blocks_of_256 import IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from tgi_trio.shard.cpu_backend.kinds.floating import E2M1, E4M3, TABLE
from tgi_trio.shard.cpu_backend.kinds.groups import (
    GROUPS_OF_2,
    GROUPS_OF_4,
    GROUPS_OF_8,
    LOWERED,
    SIGNED_8,
    SIGNED_BY_ROWS,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, CODEBOOKS, Array, StoredKind
from tgi_trio.shard.cpu_backend.kinds.nvfp4 import NVFP4
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.kinds.ternary import TQ1_0, TQ2_0
from tgi_trio.shard.cpu_backend.kinds.trellis import TRELLIS

# By `StoredMatrix.coding`, followed by bits if there are several; "affine in any order" is as
# "affine", and a "table" may be that of e2m1.
KINDS: Final[Mapping[str, StoredKind]] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q5_0,
    "Q5_1": Q5_1,
    "Q8_0": Q8_0,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_NL": IQ4_NL,
    "IQ4_XS": IQ4_XS,
    "MXFP4": MXFP4,
    "TQ1_0": TQ1_0,
    "TQ2_0": TQ2_0,
    "affine 2": GROUPS_OF_2,
    "affine 3": GROUPS_OF_4,
    "affine 4": GROUPS_OF_4,
    "affine 8": GROUPS_OF_8,
    **{f"lowered {bits}": LOWERED[max(bits, 4)] for bits in (1, 2, 3, 4, 5, 6, 8)},
    "int8": SIGNED_8,
    "table": TABLE,
    "table of e2m1": E2M1,
    "e4m3": E4M3,
    "nvfp4": NVFP4,
    **TRELLIS,
}


# A matrix that padding would make more than so many times larger is dequantised.
_MOST_PADDED: Final = 2


_REGISTER: Final = 64  # inputs in a register of a matrix unit for bytes
# Inputs of a span whose sums of products of bytes surely fit into 32 bits.
_LONGEST_BY_ROWS: Final = 1 << 16


def find_packing(matrix: StoredMatrix, *, int8_by_rows: bool = False) -> Packing | None:
    """Return how a matrix is packed, or None: the kernels cannot multiply it as stored.

    `int8_by_rows`: codes of 8 bits without zero points are multiplied with activations that share a
    scale for each row, where spans are whole registers of a matrix unit.
    """
    coding = matrix.coding
    ordered = coding == "affine in any order"
    several = coding.removesuffix(" in any order") in ("affine", "lowered", *CODEBOOKS)
    name = f"{coding.removesuffix(' in any order')} {matrix.bits}" if several else coding
    stored = KINDS.get(name)
    inputs, group = matrix.shape[1], min(matrix.group, matrix.shape[1])
    if stored is None or inputs % BLOCK_INPUTS:
        return None
    if stored.kind.span or not stored.kind.span_head:
        span = inputs if stored.kind.span == -1 else stored.kind.span or group
        fits = span % BLOCK_INPUTS == 0 and inputs % span == 0
        return Packing(stored, span) if fits else None
    if coding == "table" and inputs % group:
        return None  # its blocks cross the ends of rows
    table = b""
    if stored.kind.floating == "table":
        numbers = _shared(matrix, "table")
        table = numbers.tobytes()
        if np.array_equal(numbers, E2M1.kind.numbers):
            stored = E2M1
    if ordered:
        return _sorted(stored, inputs, _shared(matrix, "groups"))
    if group % BLOCK_INPUTS:
        return _sorted(stored, inputs, np.arange(inputs) // group, table)
    whole = inputs % _REGISTER == 0 and group % _REGISTER == 0 and group <= _LONGEST_BY_ROWS
    if int8_by_rows and stored is SIGNED_8 and whole:
        stored = SIGNED_BY_ROWS
    return Packing(stored, group, table=table)


def _shared(matrix: StoredMatrix, plane: str) -> Array:
    """Return a plane that all rows share."""
    return matrix.rows(slice(0, 0)).planes()[plane]


def _sorted(stored: StoredKind, inputs: int, groups: Array, table: bytes = b"") -> Packing | None:
    """Return a packing with inputs sorted by group, groups padded to one size; None: too large."""
    counts = np.bincount(groups)
    span = -(-int(counts.max()) // BLOCK_INPUTS) * BLOCK_INPUTS
    if span * len(counts) > _MOST_PADDED * inputs:
        return None
    order = np.full((len(counts), span), -1, np.int32)
    order[np.arange(span) < counts[:, None]] = np.argsort(groups, kind="stable")
    return Packing(stored, span, order=order.tobytes(), table=table)
