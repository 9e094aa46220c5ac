"""Quark: each matrix in the form that its tensors show; integers in words or bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import EXPONENTS, find_block
from tgi_trio.model.quantised.quark_layout import QuarkLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource, Codes
from tgi_trio.shard.checkpoint.formats.awq import PLACES, read_eights
from tgi_trio.shard.checkpoint.formats.bits import view_words
from tgi_trio.shard.checkpoint.formats.fp8 import Fp8Source
from tgi_trio.shard.checkpoint.formats.mxfp4 import Mxfp4Source
from tgi_trio.shard.checkpoint.formats.mxfp8 import Mxfp8Source
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedSource, check_finite
from tgi_trio.shard.checkpoint.formats.scale_grid import drop_idle_zeros
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_SIGN: Final = np.uint8(8)  # added to signed codes of 4 bits to make them unsigned


class QuarkSource(AffineSource):
    """Codes [outputs, inputs] with one scale, or one for each output; or [inputs, outputs] with
    scales and zero points [groups, outputs].
    """

    def __init__(
        self, shape: tuple[int, int], parts: Mapping[str, RawTensor], *, bits: int
    ) -> None:
        self._codes, self._scales = parts["codes"], parts["scales"]
        self.grouped = len(self._scales.shape) == 2
        groups = self._scales.shape[0] if self.grouped else 1
        packed = 1 if self.grouped or bits == 8 else 8
        group = shape[1] // groups
        super().__init__(shape, tuple(parts.values()), bits=bits, group=group, packed=packed)

    def scales(self, rows: slice) -> Floats:
        scales = to_float32(view_numbers(self._scales))
        return self.spread(check_finite(self._scales, scales), rows)

    def spread(self, values: NDArray[Any], rows: slice) -> NDArray[Any]:
        """Return [rows, groups] of scales or zero points as they are stored."""
        if values.ndim == 2:
            return values[:, rows].T
        return np.broadcast_to(values, self.shape[:1])[rows, None]


class WordSource(QuarkSource):
    """Codes and zero points of 4 bits, eight in a word; the only zero point of a matrix is one."""

    def __init__(
        self, layout: QuarkLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(shape, parts, bits=4)
        self._words, self._zeros = view_words(self._codes), view_words(parts["zeros"])
        self._places = PLACES if layout.reordered else range(8)
        self._sign = _SIGN if layout.signed else np.uint8(0)

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        if self.grouped:
            codes = read_eights(self._words, columns, rows, self._places).T
        else:
            codes = read_eights(self._words, rows, columns, self._places)
        return codes ^ self._sign

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        if not self._zeros.ndim:
            zero = self._zeros.astype(np.uint8) & np.uint8(15)
            return self.spread(zero, rows) ^ self._sign
        lines = np.atleast_2d(self._zeros)
        return read_eights(lines, slice(None), rows, self._places).T ^ self._sign


class ByteSource(QuarkSource):
    """Codes and zero points of 8 bits, all of them signed or none."""

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, RawTensor]) -> None:
        super().__init__(shape, parts, bits=8)
        self._type = np.int8 if parts["codes"].dtype == "I8" else np.uint8
        self._zeros = parts.get("zeros")
        if self._zeros is None:
            self.coding = "int8"

    def codes(self, rows: slice, columns: slice) -> Codes:
        codes: NDArray[Any] = self._codes.data.view(self._type).reshape(self._codes.shape)
        return codes[columns, rows].T if self.grouped else codes[rows, columns]

    def zeros(self, rows: slice) -> Codes | None:
        if self._zeros is None:
            return None
        return self.spread(self._zeros.data.view(self._type).reshape(self._zeros.shape), rows)


def open_quark(
    layout: QuarkLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
) -> QuantisedSource:
    """Return a matrix of FP8, MXFP8, MXFP4, or integers."""
    dtype = parts["codes"].dtype
    if EXPONENTS in parts:
        return Mxfp8Source(shape, parts) if dtype == E4M3 else Mxfp4Source(shape, parts)
    if dtype == E4M3:
        return Fp8Source(
            shape, parts, block=find_block(MatrixRef("", *shape), parts["scales"].shape)
        )
    if dtype == "I32":
        return WordSource(layout, shape, parts)
    return ByteSource(shape, drop_idle_zeros(parts) if dtype == "I8" else parts)
