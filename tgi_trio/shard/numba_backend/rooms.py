"""Scratch memory of kernels beside their buffers: its size and pieces."""

from __future__ import annotations

from typing import Final

TILE_BYTES: Final = 2048  # room for a tile of values: at most 32 vectors
# Rows of sums that a thread has room for: of quantised weights, a panel of which is unpacked.
ROWS: Final = 64
DELTAS: Final = 1024  # rows of what adapters add that a thread has room for, of all panels together
ROTATE_HEADS: Final = 3  # of room that `rotate` needs: a key, cosines and sines, a value
# Of the sampler: a row of scores is known by chunks of so many.
CHUNK: Final = 128
BUCKETS: Final = 512
WEIGHTS: Final = 8 * BUCKETS  # bytes


def sampler_bytes(chunks: int) -> int:
    """Return the memory a thread needs for rows of so many chunks."""
    return WEIGHTS + 20 * chunks * CHUNK
