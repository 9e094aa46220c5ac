"""FP8: e4m3 numbers (1 sign bit, 4 exponent bits, 3 fraction bits), with scales of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.fp8_layout import E4M3, Fp8Layout
from tgi_trio.model.quantised.layout import EXPONENTS
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.mxfp4 import Mxfp4Source, powers_of_two
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource
from tgi_trio.shard.checkpoint.formats.scale_grid import GridSource
from tgi_trio.shard.checkpoint.numbers import Floats


def _e4m3() -> Floats:
    """Return the values of all 256 codes (Micikevicius et al. 2022, arXiv 2209.05433)."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, codes & 7
    normal = (8 + fractions) * np.exp2(exponents - 10.0)
    positive = np.where(exponents == 0, fractions * 2.0**-9, normal)
    positive[127] = np.nan  # e4m3 has no infinity
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3_NUMBERS: Final = _e4m3()


class Fp8Source(GridSource):
    """Codes uint8 [outputs, inputs], whose values are in `E4M3_NUMBERS`."""

    coding = "e4m3"

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        return self._codes.data.reshape(self._codes.shape)[rows, columns]

    def numbers(self, rows: slice, columns: slice) -> Floats:
        return E4M3_NUMBERS[self.codes(rows, columns)]


class Fp8PowersSource(Fp8Source):
    """The same, whose scales are powers of two: their exponents, uint8."""

    def scales(self, rows: slice) -> Floats:
        exponents = self._scales.data.reshape(self._grid)[self._lines(rows)]
        return powers_of_two(self._scales, exponents)


def open_fp8(
    layout: Fp8Layout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
) -> QuantisedSource:
    """Return a matrix; without blocks in its layout, it has one scale, or one per output."""
    if parts["codes"].dtype != E4M3:
        return Mxfp4Source(shape, parts)
    kind = Fp8Source if "scales" in parts else Fp8PowersSource
    scales = parts["scales" if "scales" in parts else EXPONENTS]
    block = layout.block or ((-1, -1) if scales.shape in ((), (1,), (1, 1)) else (1, -1))
    return kind(shape, {"codes": parts["codes"], "scales": scales}, block=block)
