"""GPTQ: codes packed along the inputs, zero points along the outputs, groups in any order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.gptq_layout import GptqLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.grouped import GroupedSource


class GptqSource(GroupedSource):
    """Codes uint32 [inputs in words, outputs], zero points [groups, outputs in words]."""

    def __init__(
        self, layout: GptqLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        words, groups = parts["codes"].shape[0], parts["scales"].shape[0]
        bits, group = layout.own_settings(shape[1], words, groups)
        super().__init__(shape, parts, bits=bits, group=group, packed=_codes_together(bits))
        self._zeros = view_words(parts["zeros"])
        self._less_one = layout.zeros_less_one

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        words = self._words[columns.start * self.bits // 32 : -(-columns.stop * self.bits // 32)]
        # Words are transposed, since there are fewer of them than codes.
        codes = unpack(np.ascontiguousarray(words[:, rows].T), self.bits)
        return codes[:, : columns.stop - columns.start]

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        each = _codes_together(self.bits)
        first = rows.start // each * each
        words = self._zeros[
            :, first * self.bits // 32 : -(-rows.stop // each) * each * self.bits // 32
        ]
        zeros = unpack(np.ascontiguousarray(words), self.bits)
        zeros = zeros[:, rows.start - first : rows.stop - first]
        if self._less_one:  # a stored -1 has wrapped around
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return zeros.T


def _codes_together(bits: int) -> int:
    """Return how many codes fill whole words."""
    return 32 if bits == 3 else 32 // bits
