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
