"""GPTQ: codes packed along the inputs, zero points along the outputs, groups in any order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.gptq_layout import GptqLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource
from tgi_trio.shard.checkpoint.formats.bits import unpack
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32


class GptqSource(AffineSource):
    """Codes uint32 [inputs in words, outputs], zero points [groups, outputs in words]."""

    def __init__(
        self, layout: GptqLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        bits, groups = layout.bits, parts["scales"].shape[0]
        super().__init__(
            shape,
            tuple(parts.values()),
            bits=bits,
            groups=groups,
            group=shape[1] if layout.group == -1 else layout.group,
            order=parts.get("groups"),
            packed=_codes_together(bits),
        )
        self._packed = _words(parts["codes"])
        self._zeros = _words(parts["zeros"])
        self._scales = parts["scales"]
        self._less_one = layout.zeros_less_one

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        words = self._packed[columns.start * self.bits // 32 : -(-columns.stop * self.bits // 32)]
        # Words are transposed, which are fewer than codes.
        codes = unpack(np.ascontiguousarray(words[:, rows].T), self.bits)
        return codes[:, : columns.stop - columns.start]

    def scales(self, rows: slice) -> Floats:
        scales = to_float32(view_numbers(self._scales)[:, rows])
        return check_finite(self._scales, scales).T

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        each = _codes_together(self.bits)
        first = rows.start // each * each
        words = self._zeros[
            :, first * self.bits // 32 : -(-rows.stop // each) * each * self.bits // 32
        ]
        zeros = unpack(np.ascontiguousarray(words), self.bits)
        zeros = zeros[:, rows.start - first : rows.stop - first]
        if self._less_one:  # where that was -1, it has wrapped around
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return zeros.T


def _codes_together(bits: int) -> int:
    """Return how many codes fill whole words."""
    return 32 if bits == 3 else 32 // bits


def _words(tensor: RawTensor) -> NDArray[np.uint32]:
    return tensor.data.view(np.uint32).reshape(tensor.shape)
