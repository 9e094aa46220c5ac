"""AWQ: eight outputs of an input in a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.awq_layout import AwqLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.affine import AffineSource
from tgi_trio.shard.checkpoint.formats.bits import unpack
from tgi_trio.shard.checkpoint.formats.plain import view_numbers
from tgi_trio.shard.checkpoint.formats.quantised_matrix import check_finite
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32

_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word, from its lowest bits


class AwqSource(AffineSource):
    """Codes uint32 [inputs, outputs / 8], zero points [groups, outputs / 8]."""

    def __init__(
        self, layout: AwqLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(
            shape,
            tuple(parts.values()),
            bits=4,
            groups=parts["scales"].shape[0],
            group=shape[1] if layout.group == -1 else layout.group,
        )
        self._codes = parts["codes"]
        self._zeros = parts["zeros"]
        self._scales = parts["scales"]

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        return _outputs(self._codes, columns, rows).T

    def scales(self, rows: slice) -> Floats:
        scales = to_float32(view_numbers(self._scales)[:, rows])
        return check_finite(self._scales, scales).T

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        return _outputs(self._zeros, slice(None), rows).T


def _outputs(tensor: RawTensor, lines: slice, outputs: slice) -> NDArray[np.uint8]:
    """Return [lines, outputs] of words that hold eight outputs each."""
    first = outputs.start // 8 * 8
    words = tensor.data.view(np.uint32).reshape(tensor.shape)
    words = words[lines, first // 8 : -(-outputs.stop // 8)]
    codes = unpack(np.ascontiguousarray(words), 4).reshape(len(words), -1, 8)[..., _PLACES]
    return codes.reshape(len(words), -1)[:, outputs.start - first : outputs.stop - first]
