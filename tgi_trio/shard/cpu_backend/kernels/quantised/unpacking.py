"""A whole panel unpacked: for many rows, and for look-ups of a quantised embedding."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.quantised.blocks import unpack_block


@kernel
def unpack_panel(way, weights, blocks, span_blocks, flipped, room):
    """Write a panel to `room` as a panel of `way.unpacked`; `flipped`: of its codes."""
    table = weights
    weights += way.table_bytes
    span_head, left = weights, np.int64(0)
    for _ in range(blocks):
        if way.span_bytes:
            if left == 0:
                span_head, left = weights, span_blocks
                weights += way.span_bytes
            left -= 1
        unpack_block(way, table, span_head, weights, flipped, room)
        weights += way.block_bytes
        room += way.unpacked.block_bytes


@kernel
def unpack_blocks(way, weights, first, count, span_blocks, room):
    """Write `count` blocks of a panel, from `first` on, to the beginning of `room`."""
    for block in range(first, first + count):
        span = np.int64(0)
        if way.span_bytes:
            span = block // span_blocks
        before = weights + way.table_bytes + span * way.span_bytes
        head = before + span * span_blocks * way.block_bytes
        unpack_block(
            way, weights, head, before + way.span_bytes + block * way.block_bytes, np.int64(0), room
        )
        room += way.unpacked.block_bytes
