"""Which kind the weights of a matrix are, by what its format calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix
from tgi_trio.shard.numba_backend.kinds.blocks_of_32 import (
    IQ4_NL,
    MXFP4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
)
from tgi_trio.shard.numba_backend.kinds.blocks_of_256 import IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from tgi_trio.shard.numba_backend.kinds.groups import GROUPS_OF_4, GROUPS_OF_8, SIGNED_8
from tgi_trio.shard.numba_backend.kinds.kind import BLOCK_INPUTS, Kind, StoredKind

# By `StoredMatrix.coding`, those of several bits with these.
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
    "affine 2": GROUPS_OF_4,
    "affine 3": GROUPS_OF_4,
    "affine 4": GROUPS_OF_4,
    "affine 8": GROUPS_OF_8,
    "int8": SIGNED_8,
}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a matrix is packed: matrices with the same one can share an operation."""

    stored: StoredKind
    span: int  # inputs of a span

    @property
    def kind(self) -> Kind:
        return self.stored.kind


def find_packing(matrix: StoredMatrix) -> Packing | None:
    """Return how the kernels have a matrix; None: they have no kernel for the way it is stored."""
    coding = matrix.coding
    stored = KINDS.get(f"affine {matrix.bits}" if coding == "affine" else coding)
    if stored is None:
        return None
    span = stored.kind.span or matrix.group
    inputs = matrix.shape[1]
    if inputs % BLOCK_INPUTS or span % BLOCK_INPUTS or inputs % span:
        return None
    return Packing(stored, span)
