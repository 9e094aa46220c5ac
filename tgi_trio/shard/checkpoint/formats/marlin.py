"""Marlin's order: codes are stored as the threads of a GPU's tensor cores load them.

A tile is 16 inputs and 16 outputs. Codes of four tiles that are side by side are 1,024 in a row:
for each of 32 threads in turn, 8 of each tile, which are the operands of two products of 8 outputs.
Source: vLLM's packers of this order (marlin_utils.py, marlin_utils_test.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.marlin_layout import OUTPUTS, TILE, MarlinLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack
from tgi_trio.shard.checkpoint.formats.grouped import GroupedSource
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_ZERO: Final = 8
# a thread's codes in the order in which a word has them, lowest bits first
_NIBBLES: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def _places() -> NDArray[np.int64]:
    """Return the places among 1,024 codes of those of [4 tiles, 16 inputs, 16 outputs]."""
    places = np.empty((OUTPUTS // TILE, TILE, TILE), np.int64)
    place = 0
    for thread in range(32):
        column, first = thread // 4, 2 * (thread % 4)
        inputs = (first, first + 1, first + 8, first + 9)
        codes = [(each, column + half) for half in (0, 8) for each in inputs]
        for tile in range(OUTPUTS // TILE):
            for code in _NIBBLES:
                places[(tile, *codes[code])] = place
                place += 1
    return places.reshape(-1)


def _scale_places(grouped: bool) -> NDArray[np.int64]:
    """Return the place of each output's scale in a row of 64 or 32 scales."""
    if grouped:
        order = np.arange(OUTPUTS).reshape(8, 8).T.reshape(-1)
    else:
        order = np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return np.argsort(order)


class MarlinSource(GroupedSource):
    """Codes uint32 [inputs / 16, outputs * 2], scales [groups, outputs] in a permuted order."""

    def __init__(
        self, layout: MarlinLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(shape, parts, bits=4, group=layout.group, packed=TILE)
        self._places = _places()
        self._scale_places = _scale_places(self.group < shape[1])

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        first, last = rows.start // OUTPUTS, -(-rows.stop // OUTPUTS)
        tiles = self._words[
            columns.start // TILE : -(-columns.stop // TILE), first * 128 : last * 128
        ]
        found = unpack(np.ascontiguousarray(tiles), 4).reshape(len(tiles), last - first, -1)
        ordered = found[..., self._places].reshape(len(tiles), -1, TILE, TILE)
        codes = ordered.transpose(1, 3, 0, 2).reshape(-1, len(tiles) * TILE)
        return codes[
            rows.start - first * OUTPUTS : rows.stop - first * OUTPUTS,
            : columns.stop - columns.start,
        ]

    def scales(self, rows: slice) -> Floats:
        stored = to_float32(view_numbers(self._scales))
        each = len(self._scale_places)
        scales = stored.reshape(len(stored), -1, each)[..., self._scale_places]
        return check_finite(self._scales, scales.reshape(len(stored), -1)[:, rows]).T

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        return np.full((rows.stop - rows.start, self._scales.shape[0]), _ZERO, np.uint8)
