"""How one matrix becomes panels of a kind: its spans, and the order of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.numba_backend.kinds.kind import Codes, Kind, StoredKind


@dataclass(frozen=True, slots=True)
class Packing:
    """How a matrix is packed: matrices with the same one can share an operation."""

    stored: StoredKind
    span: int  # inputs of a span
    repeats: int = 1  # spans of a group: of one that does not divide the inputs
    # int32 [inputs of a panel]: the input of the matrix that each is, -1: none, a code of 0. Groups
    # of any inputs, or of a number of them that no blocks make up, are spans so. b"": as they are.
    order: bytes = b""
    table: bytes = b""  # float32 [16], of codes that stand for these

    @property
    def kind(self) -> Kind:
        return self.stored.kind

    @property
    def sources(self) -> NDArray[np.int32]:
        """`order`, as an array."""
        return np.frombuffer(self.order, np.int32)

    def count_inputs(self, inputs: int) -> int:
        """Return how many inputs a panel has of a matrix that has so many."""
        return len(self.sources) or inputs

    def arrange(self, codes: Codes) -> Codes:
        """Return codes, as they were read, with the inputs and the spans of panels."""
        if self.repeats > 1:
            spans = codes.codes.shape[1] // self.span
            numbers = {
                name: np.repeat(values, self.repeats, axis=1)[:, :spans]
                for name, values in codes.numbers.items()
            }
            return Codes(codes.codes, numbers, codes.table)
        if not self.order:
            return codes
        sources = self.sources
        arranged = np.zeros((len(codes.codes), len(sources)), np.uint8)
        arranged[:, sources >= 0] = codes.codes[:, sources[sources >= 0]]
        return Codes(arranged, codes.numbers, codes.table)
