"""bitsandbytes: 8 bits, a scale per output; or 4 bits, a table, and blocks of flattened rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.bitsandbytes_layout import BitsandbytesLayout, parse_state
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.quantised_matrix import (
    Array,
    QuantisedSource,
    check_finite,
)
from tgi_trio.shard.checkpoint.formats.scale_grid import GridSource
from tgi_trio.shard.checkpoint.numbers import Floats


class Int8Source(GridSource):
    """Codes int8 [outputs, inputs], and for each output the value of code 127."""

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        """Raises ModelLoadError for codes in another kernel's order."""
        super().__init__(shape, parts, block=(1, -1))
        order = parts.get("format")
        if order is not None and order.data.any():
            raise ModelLoadError(
                f"Tensor {order.name!r} in {order.file.path} says that codes are in an order for "
                "one kind of GPU; row after row alone is read."
            )

    def scales(self, rows: slice) -> Floats:
        return super().scales(rows) / np.float32(127)


class TableSource(QuantisedSource):
    """Codes of 4 bits, the first of two in the high nibble, [outputs * inputs] in all.

    Blocks of them share a scale; a block may span two rows unless its size divides a row.
    """

    coding = "table"
    bits = 4

    def __init__(
        self, layout: BitsandbytesLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        """Raises ModelLoadError as `parse_state` does."""
        super().__init__(shape, tuple(parts.values()))
        state = parts["state"]
        self._state = parse_state(state.data.tobytes(), state.name, state.file.path, shape)
        self.group = self._state.size
        self.step = self.group if shape[1] % self.group == 0 else shape[1]
        self._codes = parts["codes"]
        self._parts = parts

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        size, width = self._state.size, self.shape[1]
        first, end = rows.start * width, rows.stop * width
        blocks = slice(first // size, self._state.block_count(end))
        begin = blocks.start * size
        codes = self._read_codes(begin, min(blocks.stop * size, self.shape[0] * width))
        scales = np.repeat(self._scales(blocks), size)[: len(codes)]
        values = self._table()[codes] * scales
        return values[first - begin : end - begin].reshape(-1, width)[:, columns]

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" uint8 and "scales" of a rectangle, and the "table" for all codes.

        Raises ModelLoadError if blocks span rows.
        """
        size, width = self._state.size, self.shape[1]
        if width % size:
            raise ModelLoadError(
                f"Blocks of {size} weights of {self._codes.name!r} go over the ends of rows."
            )
        codes = self._read_codes(rows.start * width, rows.stop * width).reshape(-1, width)
        each = width // size
        scales = self._scales(slice(rows.start * each, rows.stop * each)).reshape(-1, each)
        mine = slice(columns.start // size, columns.stop // size)
        return {"codes": codes[:, columns], "scales": scales[:, mine], "table": self._table()}

    def _read_codes(self, first: int, end: int) -> NDArray[np.uint8]:
        """Return codes [end - first]; `first` must be even."""
        packed = self._codes.data[first // 2 : -(-end // 2)]
        return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[: end - first]

    def _table(self) -> Floats:
        table = self._parts["table"]
        return check_finite(table, table.data.view(np.float32))

    def _scales(self, blocks: slice) -> Floats:
        """Return the scales of consecutive blocks."""
        stored = self._parts["scales"]
        if not self._state.nested_size:
            return check_finite(stored, stored.data.view(np.float32)[blocks])
        table, nested = self._parts["nested table"], self._parts["nested scales"]
        groups = np.arange(blocks.start, blocks.stop) // self._state.nested_size
        own = check_finite(nested, nested.data.view(np.float32)[groups])
        codes = check_finite(table, table.data.view(np.float32))[stored.data[blocks]]
        return check_finite(stored, codes * own + np.float32(self._state.offset))


def open_bitsandbytes(
    layout: BitsandbytesLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
) -> QuantisedSource:
    """Return a matrix of either kind."""
    if layout.kind == "int8":
        return Int8Source(shape, parts)
    return TableSource(layout, shape, parts)
