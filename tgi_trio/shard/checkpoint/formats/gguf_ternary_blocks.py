"""GGUF's blocks of 256 weights of -1, 0 and 1 times a number: from bytes to float32.

Functions are as in `gguf_blocks.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tgi_trio.shard.checkpoint.formats.gguf_blocks import Bytes, Dequantise, half
from tgi_trio.shard.checkpoint.formats.gguf_k_blocks import two_bits
from tgi_trio.shard.checkpoint.numbers import Floats

# What moves each of five ternary digits of a byte to the front: a byte is a fraction of 243 parts.
_POWERS: Final[Bytes] = np.array([1, 3, 9, 27, 81], np.uint8)


def tq1_0(blocks: Bytes) -> Floats:
    """Bytes of five digits, bytes of four digits, scale."""
    return _weights(codes_of_tq1_0(blocks), blocks[:, 52:])


def tq2_0(blocks: Bytes) -> Floats:
    """Codes of two bits, scale."""
    return _weights(codes_of_tq2_0(blocks), blocks[:, 64:])


def codes_of_tq1_0(blocks: Bytes) -> Bytes:
    """Return codes [count, 256], 0 to 2: of 32 bytes the first digits, then the second ones, ...;
    likewise of 16 bytes; then of 4 bytes.
    """
    runs = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    return np.concatenate([_digits(data, count) for data, count in runs], axis=1)


def _digits(data: Bytes, count: int) -> Bytes:
    """Return the first `count` ternary digits of bytes [count, n], digit by digit."""
    moved = np.multiply(data[:, None], _POWERS[:count, None], dtype=np.uint8)  # it wraps around
    digits: Bytes = (moved.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digits.reshape(len(data), -1)


def codes_of_tq2_0(blocks: Bytes) -> Bytes:
    """Return codes [count, 256], 0 to 2."""
    return two_bits(blocks[:, :64]).reshape(-1, 256)


def _weights(codes: Bytes, scales: Bytes) -> Floats:
    return np.asarray((codes.astype(np.float32) - 1) * half(scales), np.float32)


TERNARY_BLOCKS: Final[dict[str, Dequantise]] = {"TQ1_0": tq1_0, "TQ2_0": tq2_0}
