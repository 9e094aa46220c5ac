"""Scratch memory of kernels beside their buffers: sizes and layout."""

from __future__ import annotations

from typing import Final

TILE_BYTES: Final = 2048  # a tile of values: at most 32 vectors
# Rows of sums for which a thread has room; a panel of quantised weights is unpacked once for them.
ROWS: Final = 64
DELTAS: Final = 1024  # rows of adapters' deltas for which a thread has room, over all panels
ROTATE_HEADS: Final = 3  # what `rotate` needs, in heads: a key, cosines and sines, a value
# The sampler divides a row of scores into chunks of this size.
CHUNK: Final = 128
BUCKETS: Final = 512
WEIGHTS: Final = 8 * BUCKETS  # bytes


def sampler_bytes(chunks: int) -> int:
    """Return the scratch memory of a thread, in bytes, for rows of `chunks` chunks."""
    return WEIGHTS + 20 * chunks * CHUNK
