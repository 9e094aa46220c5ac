"""MXFP8 (OCP Microscaling Formats 1.0, 2023): FP8 with a scale's exponent per 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping

from tgi_trio.model.quantised.layout import EXPONENTS
from tgi_trio.model.quantised.mxfp8_layout import GROUP
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.fp8 import Fp8Source
from tgi_trio.shard.checkpoint.formats.mxfp4 import powers_of_two
from tgi_trio.shard.checkpoint.numbers import Floats


class Mxfp8Source(Fp8Source):
    """Codes as in FP8; exponents uint8 [outputs, groups]."""

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        parts = {"codes": parts["codes"], "scales": parts[EXPONENTS]}
        super().__init__(shape, parts, block=(1, GROUP))

    def scales(self, rows: slice) -> Floats:
        return powers_of_two(self._scales, self._scales.data.reshape(self._grid)[rows])
