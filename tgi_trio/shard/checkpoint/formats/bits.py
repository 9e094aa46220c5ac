"""Codes of a few bits, packed into words, lowest bits first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.container import RawTensor


def view_words(tensor: RawTensor) -> NDArray[np.uint32]:
    """Return the words of a tensor of codes: a view of its file."""
    return tensor.data.view(np.uint32).reshape(tensor.shape)


def unpack(words: NDArray[np.uint32] | NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return codes [rows, n * 32 / bits] from words [rows, n], or n * 8 / bits from bytes.

    For 3, 5 and 6 bits there must be 32-bit words, and `n` a multiple of the bits.
    """
    if 8 % bits:
        return _unpack_across(words.view(np.uint32), bits)
    packed = np.ascontiguousarray(words).view(np.uint8)  # lowest byte first
    each = 8 // bits
    if each == 1:
        return packed
    codes = np.empty((*packed.shape, each), np.uint8)
    for place in range(each):
        np.right_shift(packed, bits * place, out=codes[..., place])
    codes &= (1 << bits) - 1
    return codes.reshape(len(packed), packed.shape[1] * each)  # there may be no rows


def _unpack_across(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Unpack codes that may span two words: 32 codes are in `bits` words."""
    streams = words.reshape(len(words), words.shape[1] // bits, bits)
    codes = np.empty((*streams.shape[:2], 32), np.uint8)
    for place in range(32):
        word, shift = divmod(bits * place, 32)
        code = streams[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            code |= streams[..., word + 1] << np.uint32(32 - shift)
        codes[..., place] = code & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), streams.shape[1] * 32)
