"""AWQ: eight outputs of an input in a word, in an interleaved order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.quantised.awq_layout import AwqLayout
from tgi_trio.shard.checkpoint.container import RawTensor
from tgi_trio.shard.checkpoint.formats.bits import unpack, view_words
from tgi_trio.shard.checkpoint.formats.grouped import GroupedSource

PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word, lowest bits first


class AwqSource(GroupedSource):
    """Codes uint32 [inputs, outputs / 8], zero points [groups, outputs / 8]."""

    def __init__(
        self, layout: AwqLayout, shape: tuple[int, int], parts: Mapping[str, RawTensor]
    ) -> None:
        super().__init__(shape, parts, bits=4, group=layout.group)
        self._zeros = view_words(parts["zeros"])

    def codes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        return read_eights(self._words, columns, rows, PLACES).T

    def zeros(self, rows: slice) -> NDArray[np.uint8]:
        return read_eights(self._zeros, slice(None), rows, PLACES).T


def read_eights(
    words: NDArray[np.uint32], lines: slice, codes: slice, places: Sequence[int]
) -> NDArray[np.uint8]:
    """Return codes [lines, codes] of words with eight of 4 bits each.

    `places`: the place of each code in its word, lowest bits first.
    """
    first = codes.start // 8 * 8
    words = words[lines, first // 8 : -(-codes.stop // 8)]
    found = unpack(np.ascontiguousarray(words), 4).reshape(len(words), -1, 8)[..., list(places)]
    return found.reshape(len(words), -1)[:, codes.start - first : codes.stop - first]
