"""weight = scale * (code - zero): integers with a scale and a zero point for each group."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.quantised_matrix import Array, QuantisedSource
from tgi_trio.shard.checkpoint.numbers import Floats

Codes = NDArray[np.uint8] | NDArray[np.int8]


class AffineSource(QuantisedSource):
    """A `QuantisedSource` of codes. Subclasses read codes, scales and zero points."""

    coding = "affine"

    def __init__(
        self,
        shape: tuple[int, int],
        tensors: Sequence[RawTensor],
        *,
        bits: int,
        group: int,
        order: NDArray[np.int64] | None = None,
        packed: int = 1,
    ) -> None:
        """`group`: inputs of each group; the last may have fewer. `packed`: inputs per word.

        `order` [inputs]: the group of each input, if groups may not be contiguous.
        """
        super().__init__(shape, tensors)
        self.bits = bits
        self.group = group
        contiguous = order is None or np.array_equal(order, np.arange(shape[1]) // group)
        self._order = None if contiguous else order
        if self._order is not None:
            self.coding = "affine in any order"
        # The only group of all inputs goes with any of them.
        grouped = self._order is None and group < shape[1]
        self.step = math.lcm(packed, group) if grouped else packed

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> Codes:
        """Return integers [rows, columns]."""

    @abstractmethod
    def scales(self, rows: slice) -> Floats:
        """Return finite float32 [rows, groups]."""

    @abstractmethod
    def zeros(self, rows: slice) -> Codes | None:
        """Return zero points [rows, groups], or None if there are none."""

    def numbers(self, rows: slice, columns: slice) -> Floats:
        """Return the values of codes [rows, columns], before scale and zero point."""
        return self.codes(rows, columns).astype(np.float32)

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values = self.numbers(rows, columns)
        scales, zeros = self.scales(rows), self.zeros(rows)
        # contiguous groups of one size
        if self._order is None and values.shape[1] % self.group == 0:
            mine = slice(columns.start // self.group, columns.stop // self.group)
            runs = values.reshape(len(values), mine.stop - mine.start, self.group)
            if zeros is not None:
                runs -= zeros[:, mine, None]
            runs *= scales[:, mine, None]
            return values
        groups = self._groups(columns)
        if zeros is not None:
            values -= zeros[:, groups]
        values *= scales[:, groups]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" [rows, columns], "scales" and, if there are any, "zeros" [rows, groups].

        If groups are not contiguous there are all of them, and "groups" int [columns]: the group of
        each input.
        """
        mine, order = slice(None), {}
        if self._order is None:
            mine = slice(columns.start // self.group, -(-columns.stop // self.group))
        else:
            order = {"groups": self._order[columns]}
        zeros = self.zeros(rows)
        return {
            "codes": self.codes(rows, columns),
            "scales": self.scales(rows)[:, mine],
            **({} if zeros is None else {"zeros": zeros[:, mine]}),
            **order,
        }

    def _groups(self, columns: slice) -> NDArray[np.int64]:
        """Return the group of each input."""
        if self._order is not None:
            return self._order[columns]
        return np.arange(columns.start, columns.stop) // self.group


def read_order(tensor: RawTensor | None, groups: int) -> NDArray[np.int64] | None:
    """Return the group of each input from int32 [inputs]; None: there is no such tensor.

    Raises ModelLoadError for a group that is not one of `groups`.
    """
    if tensor is None:
        return None
    order = tensor.data.view(np.int32).astype(np.int64)
    if order.size and (order.min() < 0 or order.max() >= groups):
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} puts an input into group "
            f"{order.max() if order.max() >= groups else order.min()} of {groups}."
        )
    return order
