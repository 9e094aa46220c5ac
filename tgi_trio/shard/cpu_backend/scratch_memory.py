"""Scratch memory of kernels beside their buffers: sizes and layout."""

from __future__ import annotations

from typing import Final

TILE_BYTES: Final = 2048  # a tile of values: at most 32 vectors
# Rows of sums for which a thread has room; a panel of quantised weights is unpacked once for them.
ROWS: Final = 64
DELTAS: Final = 1024  # rows of adapters' deltas for which a thread has room, over all panels
# Products of a matrix unit before they are scaled: of two blocks, each of up to two parts, 16 rows
# and 16 outputs; or of a span, 32 rows and 32 outputs.
PRODUCTS_BYTES: Final = 2 * 2 * 1024
ROTATE_HEADS: Final = 3  # what `rotate` needs, in heads: a key, cosines and sines, a value
# The scratch memory of an index: two tiles of a vector of scores for each head, counts of buckets.
INDEX_TILES: Final = 1024
INDEX_COUNTS: Final = 2048
# Tokens of a step up to which several threads score the context of one.
MOST_SHARED: Final = 64
LISTED_AHEAD: Final = 8  # rows of V beyond a list, which are prefetched
# The sampler divides a row of scores into chunks of this size.
CHUNK: Final = 128
BUCKETS: Final = 512
WEIGHTS: Final = 8 * BUCKETS  # bytes


def count_score_bytes(longest: int) -> int:
    """Return the bytes of one head's scores of a context of up to `longest` tokens.

    They are whole pairs of blocks, and one more line, so that heads do not share cache sets.
    """
    return -(-longest // 32) * 32 * 4 + 64


def count_unit_bytes(longest: int, size: int) -> int:
    """Return the bytes of one head's scores of blocks of `size` tokens, of such a context."""
    return (count_score_bytes(longest) // (4 * size) + 16) * 4


def sampler_bytes(chunks: int) -> int:
    """Return the scratch memory of a thread, in bytes, for rows of `chunks` chunks."""
    return WEIGHTS + 20 * chunks * CHUNK
