"""How a matrix becomes panels of a kind: its spans, and the order of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu_backend.kinds.kind import Codes, Kind, StoredKind


@dataclass(frozen=True, slots=True)
class Packing:
    """How a matrix is packed; matrices packed alike can share an operation."""

    stored: StoredKind
    span: int  # inputs of a span, of which the last may have fewer
    # int32 [inputs of a panel]: the matrix input at each place; -1: padding, a code of 0. It makes
    # spans of groups with arbitrary inputs, or whose size is not a multiple of a block. b"": as
    # stored.
    order: bytes = b""
    table: bytes = b""  # float32 [16], the values of codes with a table

    @property
    def kind(self) -> Kind:
        return self.stored.kind

    @property
    def sources(self) -> NDArray[np.int32]:
        """`order`, as an array."""
        return np.frombuffer(self.order, np.int32)

    def count_inputs(self, inputs: int) -> int:
        """Return how many inputs a panel has, for a matrix with `inputs`."""
        return len(self.sources) or inputs

    def arrange(self, codes: Codes) -> Codes:
        """Return codes, as read from a matrix, in the order and spans of panels."""
        if not self.order:
            return codes
        sources = self.sources
        arranged = np.zeros((len(codes.codes), len(sources)), np.uint8)
        arranged[:, sources >= 0] = codes.codes[:, sources[sources >= 0]]
        return Codes(arranged, codes.numbers, codes.table)
