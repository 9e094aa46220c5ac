"""Codes in a tensor [outputs, inputs], with scales for blocks of outputs and inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource, Codes, read_order
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32


class GridSource(AffineSource):
    """Codes, int8 or packed, which a subclass reads. Zero points: int8, shaped like scales."""

    def __init__(
        self,
        shape: tuple[int, int],
        parts: Mapping[str, RawTensor],
        *,
        block: tuple[int, int],
        bits: int = 8,
        packed: int = 1,
    ) -> None:
        """`block`: outputs and inputs that share a scale, -1: all. `packed`: inputs per word."""
        rows, columns = (
            whole if size == -1 else size for size, whole in zip(block, shape, strict=True)
        )
        self._scales, self._zeros = parts["scales"], parts.get("zeros")
        self._grid = (-(-shape[0] // rows), -(-shape[1] // columns))
        self._outputs = rows
        super().__init__(
            shape,
            tuple(parts.values()),
            bits=bits,
            group=columns,
            order=read_order(parts.get("groups"), self._grid[1]),
            packed=packed,
        )
        self._codes = parts["codes"]
        if packed == 1 and self._zeros is None and self.coding == "affine":
            self.coding = "int8"

    def codes(self, rows: slice, columns: slice) -> Codes:
        return self._codes.data.view(np.int8).reshape(self._codes.shape)[rows, columns]

    def scales(self, rows: slice) -> Floats:
        scales = to_float32(view_numbers(self._scales).reshape(self._grid))
        return check_finite(self._scales, scales[self._lines(rows)])

    def zeros(self, rows: slice) -> Codes | None:
        if self._zeros is None:
            return None
        return self._zeros.data.view(np.int8).reshape(self._grid)[self._lines(rows)]

    def _lines(self, rows: slice) -> NDArray[np.int64]:
        """Return the rows of the grid that have the scales of these outputs."""
        return np.arange(rows.start, rows.stop) // self._outputs


def drop_idle_zeros(parts: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Return a matrix's parts without zero points that are all 0, as of symmetric codes: kernels
    multiply these without any.
    """
    return {role: part for role, part in parts.items() if role != "zeros" or bool(part.data.any())}
