"""weight = scale * (code - zero): whole numbers, with a scale and a zero point for each group."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.quantised_matrix import Array, Source
from tgi_trio.shard.checkpoint.numbers import Floats

Codes = NDArray[np.uint8] | NDArray[np.int8]


class AffineSource(Source):
    """A `Source` of whole numbers. A format says where its codes, scales and zero points lie."""

    def __init__(
        self,
        shape: tuple[int, int],
        tensors: Sequence[RawTensor],
        *,
        bits: int,
        groups: int,
        group: int,
        order: RawTensor | None = None,
        packed: int = 1,
    ) -> None:
        """`group`: inputs of each of `groups`, the last may have fewer. `packed`: inputs per word.

        `order`: int32 [inputs], the group of each input, where they are no runs. Raises
        ModelLoadError for one that is not there.
        """
        super().__init__(shape, tensors)
        self.bits = bits
        self.group = group
        self._order = None if order is None else _read_order(order, groups, group, shape[1])
        self.step = packed if self._order is not None else math.lcm(packed, group)

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> Codes:
        """Return whole numbers [rows, columns]."""

    @abstractmethod
    def scales(self, rows: slice) -> Floats:
        """Return finite float32 [rows, groups]."""

    @abstractmethod
    def zeros(self, rows: slice) -> Codes | int:
        """Return zero points [rows, groups], or the one that all share."""

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values = self.codes(rows, columns).astype(np.float32)
        scales, zeros = self.scales(rows), self.zeros(rows)
        if self._order is None and values.shape[1] % self.group == 0:  # runs of one size
            mine = slice(columns.start // self.group, columns.stop // self.group)
            runs = values.reshape(len(values), mine.stop - mine.start, self.group)
            runs -= zeros if isinstance(zeros, int) else zeros[:, mine, None]
            runs *= scales[:, mine, None]
            return values
        groups = self._groups(columns)
        values -= zeros if isinstance(zeros, int) else zeros[:, groups]
        values *= scales[:, groups]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" [rows, columns], "scales" and "zeros" [rows, groups].

        Inputs in no order have all groups, and "groups" int [columns]: the group of each.
        """
        scales, zeros = self.scales(rows), self.zeros(rows)
        if isinstance(zeros, int):
            zeros = np.full(scales.shape, zeros, np.uint8)
        planes: dict[str, NDArray[Any]] = {"codes": self.codes(rows, columns)}
        if self._order is not None:
            return planes | {"scales": scales, "zeros": zeros, "groups": self._order[columns]}
        mine = slice(columns.start // self.group, -(-columns.stop // self.group))
        return planes | {"scales": scales[:, mine], "zeros": zeros[:, mine]}

    def _groups(self, columns: slice) -> NDArray[np.int64]:
        """Return the group of each input."""
        if self._order is not None:
            return self._order[columns]
        return np.arange(columns.start, columns.stop) // self.group


def _read_order(
    tensor: RawTensor, groups: int, group: int, inputs: int
) -> NDArray[np.int64] | None:
    """Return the group of each input, None where they are runs all the same."""
    order = tensor.data.view(np.int32).astype(np.int64)
    if order.size and (order.min() < 0 or order.max() >= groups):
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} puts an input into group "
            f"{order.max() if order.max() >= groups else order.min()} of {groups}."
        )
    return None if np.array_equal(order, np.arange(inputs) // group) else order
