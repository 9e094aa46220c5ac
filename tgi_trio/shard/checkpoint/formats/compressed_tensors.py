"""compressed-tensors: 8-bit integers, packed integers of 4 or 8 bits, FP8 and FP4."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.compressed_layout import CompressedLayout, Scheme
from tgi_trio.model.quantised.layout import EXPONENTS, STEPS
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import Codes
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.fp8 import Fp8Source
from tgi_trio.shard.checkpoint.formats.mxfp4 import Mxfp4Source
from tgi_trio.shard.checkpoint.formats.mxfp8 import Mxfp8Source
from tgi_trio.shard.checkpoint.formats.nvfp4 import Nvfp4Source
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource
from tgi_trio.shard.checkpoint.formats.scale_grid import GridSource


class PackedSource(GridSource):
    """Codes uint32 [outputs, inputs in words], stored with half their range added.

    Zero points are packed along the outputs, [outputs in words, groups], with the same offset.
    """

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        """Raises ModelLoadError for a matrix whose original shape was different."""
        _check_shape(parts["shape"], shape)
        each = 32 // scheme.bits
        super().__init__(shape, parts, block=scheme.block, bits=scheme.bits, packed=each)
        self._each = each

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        words = view_words(self._codes)[
            rows, columns.start // self._each : -(-columns.stop // self._each)
        ]
        return unpack(words, self.bits)[:, : columns.stop - columns.start]

    def zeros(self, rows: slice) -> Codes:
        if self._zeros is None:
            count = rows.stop - rows.start
            return np.full((count, self._grid[1]), 1 << (self.bits - 1), np.uint8)
        first = rows.start // self._each
        words = view_words(self._zeros)[first : -(-rows.stop // self._each)]
        zeros = unpack(np.ascontiguousarray(words.T), self.bits).T
        return zeros[rows.start - first * self._each : rows.stop - first * self._each]


def open_compressed(
    layout: CompressedLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
) -> QuantisedSource:
    """Return a matrix of the form that its tensors show."""
    if parts["codes"].dtype == "I32":
        return PackedSource(layout.schemes["pack-quantized"], shape, parts)
    if STEPS in parts:
        return Nvfp4Source(shape, parts, divides=True)
    if parts["codes"].dtype == "U8":
        return Mxfp4Source(shape, parts)
    if EXPONENTS in parts:
        return Mxfp8Source(shape, parts)
    if parts["codes"].dtype == "I8":
        return GridSource(shape, parts, block=layout.schemes["int-quantized"].block)
    return Fp8Source(shape, parts, block=layout.schemes["float-quantized"].block)


def _check_shape(tensor: RawTensor, shape: tuple[int, int]) -> None:
    found = tensor.data.view(np.int64 if tensor.dtype == "I64" else np.int32).tolist()
    if found != list(shape):
        raise ModelLoadError(
            f"Tensor {tensor.name!r} in {tensor.file.path} says that its matrix has shape {found}, "
            f"but config.json asks for {list(shape)}."
        )
