"""MLX: codes in words, lowest bits first, row after row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import STEPS
from tgi_trio.model.quantised.mlx_layout import LOWS
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.lowered import LoweredSource
from tgi_trio.shard.checkpoint.formats.mxfp4 import Mxfp4Source
from tgi_trio.shard.checkpoint.formats.mxfp8 import Mxfp8Source
from tgi_trio.shard.checkpoint.formats.nvfp4 import Nvfp4Source
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource, check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_TOGETHER: Final = 32  # codes that fill whole words, whatever their bits


class MlxSource(LoweredSource):
    """Codes uint32 [outputs, words], scales and biases [outputs, groups]; a bias is added."""

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        super().__init__(shape, tuple(parts.values()))
        self._words, self._scales, self._biases = (
            view_words(parts["codes"]),
            parts["scales"],
            parts[LOWS],
        )
        self.bits = self._words.shape[1] * 32 // shape[1]
        self.group = shape[1] // self._scales.shape[1]
        self.step = math.lcm(self.group, _TOGETHER)

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        words = self._words[rows, columns.start * self.bits // 32 : columns.stop * self.bits // 32]
        return unpack(np.ascontiguousarray(words), self.bits)

    def scales(self, rows: slice, groups: slice) -> Floats:
        return _read(self._scales, rows, groups)

    def lows(self, rows: slice, groups: slice) -> Floats:
        return -_read(self._biases, rows, groups)


def _read(tensor: RawTensor, rows: slice, groups: slice) -> Floats:
    """Return finite float32; raises ModelLoadError for others."""
    return check_finite(tensor, to_float32(view_numbers(tensor)[rows, groups]))


def open_mlx(shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> QuantisedSource:
    """Return a matrix in the mode that its parts show: affine, nvfp4, mxfp4 or mxfp8."""
    if LOWS in parts:
        return MlxSource(shape, parts)
    if STEPS in parts:
        return Nvfp4Source(shape, parts, divides=False)
    codes = parts["codes"]
    if codes.shape[1] * 4 == shape[1]:  # a byte each
        return Mxfp8Source(shape, {**parts, "codes": replace(codes, dtype=E4M3, shape=shape)})
    return Mxfp4Source(shape, parts)
