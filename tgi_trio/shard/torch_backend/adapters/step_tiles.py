"""The tiles of a step: neighbouring tokens with one adapter, as launches on a device read them."""

from __future__ import annotations

from typing import Final

import numpy as np

from tgi_trio.shard.torch_backend.staging import Array

NO_TILES: Final = np.zeros((0, 3), np.int32)


def pad_tiles(tiles: Array, count: int) -> Array:
    """Return so many tiles, the last of them without tokens."""
    return np.concatenate((tiles, np.zeros((count - len(tiles), 3), np.int32)))


def list_tiles(slots: Array, query_starts: Array, most: int) -> Array:
    """Return tiles, int32 [n, 3]: slot, first token, number of tokens.

    Neighbouring rows with the same adapter share tiles. `slots` [R]: each row's, -1 for none;
    `query_starts` [R + 1]; `most`: tokens of the largest tile.
    """
    if not len(slots):
        return NO_TILES
    changes = np.flatnonzero(np.diff(slots)) + 1
    firsts = np.concatenate(([0], changes))
    ends = np.concatenate((changes, [len(slots)]))
    firsts, ends = firsts[slots[firsts] >= 0], ends[slots[firsts] >= 0]
    begins, stops = query_starts[firsts].astype(np.int64), query_starts[ends].astype(np.int64)
    counts = -(-(stops - begins) // most)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    at = np.repeat(begins, counts) + within * most
    left = np.minimum(np.repeat(stops, counts) - at, most)
    return np.stack((np.repeat(slots[firsts], counts), at, left), axis=1).astype(np.int32)


def most_tiles(tokens: int, adapters: int, most: int) -> int:
    """Return the most tiles of `list_tiles` for so many tokens, in rows sorted by adapter.

    `adapters`: the most different ones; `most`: tokens of the largest tile.
    """
    return min(tokens, tokens // most + adapters)
