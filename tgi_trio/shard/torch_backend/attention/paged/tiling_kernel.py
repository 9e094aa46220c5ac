"""Cutting the rows of a step into tiles on the device, for CUDA graphs that outlive those rows.

Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "tiles"])
def list_tiles(
    tile_rows,  # int32 [tiles], as is the next: see `attend_tile`
    tile_starts,
    query_starts,  # int32 [rows + 1]
    rows,
    tiles,  # at least as many as there may be
    GROUP: tl.constexpr,  # query heads of a KV head
    LANES: tl.constexpr,  # pairs of a tile
    ABOVE: tl.constexpr,  # only rows with more pairs than these
    UPTO: tl.constexpr,  # and no more than these; 0: no limit
    ROWS: tl.constexpr,  # a power of two, not below `rows`
    BLOCK: tl.constexpr,  # tiles of a program
):
    """Find the row and the first pair of some tiles.

    Later rows and later pairs of a row come first: prompts come after decodes in a step, and what
    begins last should not take longest. Surplus tiles begin after the last pair, so they have
    nothing to do.
    """
    row = tl.arange(0, ROWS)
    there = row < rows
    first = tl.load(query_starts + row, mask=there, other=0)
    pairs = (tl.load(query_starts + row + 1, mask=there, other=0) - first) * GROUP
    here = pairs > ABOVE
    if UPTO > 0:
        here = here & (pairs <= UPTO)
    own = tl.where(here, tl.cdiv(pairs, LANES), 0)
    ends = tl.cumsum(own, 0)
    total = tl.sum(own, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(tile < total, total - 1 - tile, tile)
    passed = (ends[None, :] <= place[:, None]) & (row < rows)[None, :]
    before = tl.sum(tl.where(passed, own[None, :], 0), 1)
    found = tl.sum(passed.to(tl.int32), 1)
    left = found == rows
    start = tl.where(left, tl.load(query_starts + rows) * GROUP, (place - before) * LANES)
    tl.store(tile_rows + tile, tl.where(left, rows - 1, found), mask=tile < tiles)
    tl.store(tile_starts + tile, start, mask=tile < tiles)
