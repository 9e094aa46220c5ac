"""EXL3's codes in panels: what two halves of a column share of a ring lies side by side.

A column of a block is two rings, of 16 inputs each and all its 16 outputs. Output o and output
o + 8 take turns in a ring, four codes each: a *chunk*. The eight chunks of an output in a block
follow each other in words of 32 bits, from the lowest bit on, and in a chunk the first code of the
ring has the highest bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.fit.kernel_claims import LANES

CHUNK: Final = 4  # codes


def fill_rings(blocks: NDArray[np.uint8], bits: int, codes: NDArray[np.uint8]) -> None:
    """Write codes [out, in] of `bits` into `blocks` [panels, spans, blocks of a span, bytes].

    Their words are [bits, columns, 16 outputs].
    """
    shape = blocks.shape
    rows: NDArray[Any] = codes.reshape(shape[0], -1, LANES, shape[1] * shape[2], 8, CHUNK)
    chunks = np.zeros(rows.shape[:-1], np.uint32)
    for place in range(CHUNK):
        chunks <<= np.uint32(bits)
        chunks |= rows[..., place]
    words = np.zeros((shape[0], shape[1] * shape[2], bits, rows.shape[1], LANES), np.uint32)
    for number in range(8):
        word, shift = divmod(CHUNK * bits * number, 32)
        chunk = chunks[..., number].transpose(0, 3, 1, 2)
        words[:, :, word] |= chunk << np.uint32(shift)
        if shift + CHUNK * bits > 32:
            words[:, :, word + 1] |= chunk >> np.uint32(32 - shift)
    blocks[:] = words.view(np.uint8).reshape(shape)
