"""MXFP4: two 4-bit numbers in a byte, and the exponent of a scale for every 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.layout import EXPONENTS
from tgi_trio.model.quantised.mxfp4_layout import GROUP
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack
from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.checkpoint.formats.quantised_matrix import Array, QuantisedSource
from tgi_trio.shard.checkpoint.numbers import Floats

_NO_NUMBER = 255
_BIAS = 127


class Mxfp4Source(QuantisedSource):
    """Codes uint8 [outputs, groups * 16], the first of two in the low nibble."""

    coding = "table"
    bits = 4
    group = GROUP
    step = GROUP

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        super().__init__(shape, tuple(parts.values()))
        self._codes, self._exponents = parts["codes"], parts[EXPONENTS]
        self._table = HALVES_OF_E2M1 / np.float32(2)

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values = self._table[self._read_codes(rows, columns)]
        runs = values.reshape(len(values), -1, GROUP)
        runs *= self._scales(rows, columns)[..., None]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" uint8 and "scales" of a rectangle, and the "table" for all codes."""
        return {
            "codes": self._read_codes(rows, columns),
            "scales": self._scales(rows, columns),
            "table": self._table,
        }

    def _read_codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        packed = self._codes.data.reshape(self.shape[0], -1)
        return unpack(packed[rows, columns.start // 2 : columns.stop // 2], 4)

    def _scales(self, rows: slice, columns: slice) -> Floats:
        """Return 2^exponent [outputs, groups]; raises ModelLoadError for NaN."""
        exponents = self._exponents.data.reshape(self.shape[0], -1)
        exponents = exponents[rows, columns.start // GROUP : columns.stop // GROUP]
        return powers_of_two(self._exponents, exponents)


def powers_of_two(tensor: RawTensor, exponents: NDArray[np.uint8]) -> Floats:
    """Return a tensor's scales from their exponents (E8M0); raises ModelLoadError for NaN."""
    if (exponents == _NO_NUMBER).any():
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} holds a scale that is infinite or not a "
            "number."
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
