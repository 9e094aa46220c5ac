"""NVFP4: two 4-bit numbers in a byte, an 8-bit scale for every 16 inputs, and a common factor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.layout import STEPS
from tgi_trio.model.quantised.nvfp4_layout import GROUP
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack
from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.formats.gguf_blocks import HALVES_OF_E2M1
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import (
    Array,
    QuantisedSource,
    check_finite,
)
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32


class Nvfp4Source(QuantisedSource):
    """Codes uint8 [outputs, inputs / 2], the first of two in the low nibble."""

    coding = "nvfp4"
    bits = 4
    group = GROUP
    step = 2 * GROUP  # the kernels' blocks have two groups

    def __init__(
        self, shape: tuple[int, int], parts: Mapping[str, RawTensor], *, divides: bool
    ) -> None:
        """`divides`: scales are divided by the factor, if there is one; else it multiplies them."""
        super().__init__(shape, tuple(parts.values()))
        self._codes, self._steps, self._factor = parts["codes"], parts[STEPS], parts.get("scales")
        self._divides = divides

    def dequantise(self, rows: slice, columns: slice) -> Floats:
        values = HALVES_OF_E2M1[self._read_codes(rows, columns)]
        runs = values.reshape(len(values), -1, GROUP)
        runs *= (self._read_steps(rows, columns) * self._unit())[..., None]
        return values

    def planes(self, rows: slice, columns: slice) -> Mapping[str, Array]:
        """Return "codes" uint8 and "steps" [outputs, groups] of a rectangle, and the "unit" by
        which steps are multiplied; values of codes are doubled.
        """
        return {
            "codes": self._read_codes(rows, columns),
            "steps": self._read_steps(rows, columns),
            "unit": np.array([self._unit()]),
        }

    def _read_codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        packed = self._codes.data.reshape(self.shape[0], -1)
        return unpack(packed[rows, columns.start // 2 : columns.stop // 2], 4)

    def _read_steps(self, rows: slice, columns: slice) -> Floats:
        steps = self._steps.data.reshape(self.shape[0], -1)
        steps = steps[rows, columns.start // GROUP : columns.stop // GROUP]
        return check_finite(self._steps, E4M3_NUMBERS[steps])

    def _unit(self) -> np.float32:
        """Return half the factor of the scales; raises ModelLoadError if it is not finite."""
        if self._factor is None:
            return np.float32(0.5)
        factor = to_float32(view_numbers(self._factor)).reshape(1)
        with np.errstate(divide="ignore"):
            unit = (1 / factor if self._divides else factor) / np.float32(2)
        return np.float32(check_finite(self._factor, unit.astype(np.float32))[0])
