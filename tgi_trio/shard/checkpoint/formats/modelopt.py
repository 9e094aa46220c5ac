"""ModelOpt: each matrix in the format that its tensors show."""

from __future__ import annotations

from collections.abc import Mapping

from tgi_trio.model.quantised.fp8_layout import Fp8Layout
from tgi_trio.model.quantised.layout import EXPONENTS, STEPS
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.fp8 import open_fp8
from tgi_trio.shard.checkpoint.formats.mxfp8 import Mxfp8Source
from tgi_trio.shard.checkpoint.formats.nvfp4 import Nvfp4Source
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource


def open_modelopt(shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> QuantisedSource:
    """Return a matrix of FP8, MXFP8 or NVFP4."""
    if STEPS in parts:
        return Nvfp4Source(shape, parts, divides=False)
    if EXPONENTS in parts:
        return Mxfp8Source(shape, parts)
    return open_fp8(Fp8Layout(None), shape, parts)
