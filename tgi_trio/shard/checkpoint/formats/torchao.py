"""torchao: 8-bit integers, FP8, and 4 bits with floating-point zero points, plain or in tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import find_block
from tgi_trio.model.quantised.torchao_layout import TILE_INPUTS, TILE_OUTPUTS, TILED
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.fp8 import Fp8Source
from tgi_trio.shard.checkpoint.formats.lowered import LoweredSource
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource, check_finite
from tgi_trio.shard.checkpoint.formats.scale_grid import GridSource, drop_idle_zeros
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_HALF: Final = 8  # of the range of 4 bits: what signed codes lack to be unsigned ones


class PairSource(LoweredSource):
    """Signed codes, uint8 [outputs, inputs / 2], the first of two in the low nibble.

    Scales and zero points are [groups, outputs]: weight = scale * code + zero.
    """

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        group = shape[1] // parts["scales"].shape[0]
        super().__init__(shape, tuple(parts.values()))
        self.bits, self.group, self.step = 4, group, group
        self._codes, self._scales, self._zeros = parts["codes"], parts["scales"], parts["zeros"]

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        packed = self._codes.data.reshape(self._codes.shape)
        return unpack(packed[rows, columns.start // 2 : columns.stop // 2], 4) ^ np.uint8(_HALF)

    def scales(self, rows: slice, groups: slice) -> Floats:
        return _read_columns(self._scales, rows, groups)

    def lows(self, rows: slice, groups: slice) -> Floats:
        zeros = _read_columns(self._zeros, rows, groups)
        lows: Floats = self.scales(rows, groups) * np.float32(_HALF) - zeros
        return lows


class TileSource(LoweredSource):
    """Codes as the threads of tinygemm's kernel read them: words [tiles of 8 outputs, tiles of 128
    inputs, 32 threads, 4].

    A thread has one output of a tile, and each of its words eight of 32 inputs. Scales and zero
    points are [groups, outputs, 2]: weight = scale * (code - 8) + zero. Outputs and inputs are
    padded.
    """

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        words = view_words(parts["codes"])
        group = words.shape[1] * TILE_INPUTS // parts[TILED].shape[0]
        super().__init__(shape, tuple(parts.values()))
        self.bits, self.group, self.step = 4, group, group
        self._words, self._both = words, parts[TILED]

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        top, left = rows.start // TILE_OUTPUTS, columns.start // TILE_INPUTS
        tiles = self._words[
            top : math.ceil(rows.stop / TILE_OUTPUTS), left : math.ceil(columns.stop / TILE_INPUTS)
        ]
        tall, wide = tiles.shape[:2]
        # Of inputs: runs of 32, four runs of eight in these, four pairs in these.
        codes = unpack(np.ascontiguousarray(tiles).reshape(-1, 1), 4)
        codes = codes.reshape(tall, wide, TILE_OUTPUTS, 4, 4, 2, 4)  # .., pair, run of 32, odd, run
        codes = codes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(tall * TILE_OUTPUTS, -1)
        down, right = rows.start - top * TILE_OUTPUTS, columns.start - left * TILE_INPUTS
        return codes[
            down : down + rows.stop - rows.start, right : right + columns.stop - columns.start
        ]

    def scales(self, rows: slice, groups: slice) -> Floats:
        return self._read(rows, groups, 0)

    def lows(self, rows: slice, groups: slice) -> Floats:
        zeros = self._read(rows, groups, 1)
        lows: Floats = self.scales(rows, groups) * np.float32(_HALF) - zeros
        return lows

    def _read(self, rows: slice, groups: slice, which: int) -> Floats:
        both = to_float32(view_numbers(self._both)[groups, rows, which])
        return check_finite(self._both, both).T


def open_torchao(shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> QuantisedSource:
    """Return a matrix of the form that its tensors show."""
    if TILED in parts:
        return TileSource(shape, parts)
    codes = parts["codes"]
    if codes.shape != shape:
        return PairSource(shape, parts)
    block = find_block(MatrixRef("", *shape), parts["scales"].shape)
    if codes.dtype == E4M3:
        return Fp8Source(shape, parts, block=block)
    return GridSource(shape, drop_idle_zeros(parts), block=block)


def _read_columns(tensor: RawTensor, rows: slice, groups: slice) -> Floats:
    """Return finite float32 [rows, groups] of a tensor [groups, outputs]."""
    return check_finite(tensor, to_float32(view_numbers(tensor)[groups, rows])).T
