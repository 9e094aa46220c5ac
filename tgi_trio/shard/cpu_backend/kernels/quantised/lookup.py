"""Embedding look-up in a quantised matrix, which dequantises the rows that it needs."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.quantised.link import call_panel_kernel
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    load_byte,
    load_float,
    load_int,
    store_float,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.tables import UNPACK
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL


@kernel
def embed_quantised(rank, step, op, room):
    """hidden[t] = embedding[token t] * scale; a token's whole panel is unpacked to `room`.

    The head may share these panels, so that a tied matrix is stored only once.
    """
    blocks, none = op.width // BLOCK_INPUTS, np.int64(0)
    head_bytes = (op.parts + op.lows) * 4 * PANEL
    for t in range(rank, step.tokens, step.threads):
        token = load_int(step.token_ids + 4 * t)
        panel, lane = token // PANEL, token % PANEL
        call_panel_kernel(
            op.multiply, none, none, none, op.weights + panel * op.panel_bytes, blocks,
            op.span_blocks, op.panel_bytes, np.int64(UNPACK), room, none,
        )  # fmt: skip
        target = step.buffers[op.target] + t * op.width * 4
        codes_of_lane = head_bytes + lane // LANES * 4 * LANES + lane % LANES * 4
        for block in range(blocks):
            head = room + block * op.room_bytes
            for i in range(BLOCK_INPUTS):
                low = np.float32(0)
                if op.lows:
                    part = op.parts + i * op.lows // BLOCK_INPUTS
                    low = load_float(head + 4 * (PANEL * part + lane))
                part = i * op.parts // BLOCK_INPUTS
                scale = load_float(head + 4 * (PANEL * part + lane))
                code = load_byte(head + codes_of_lane + i // 4 * 4 * PANEL + i % 4)
                value = scale * np.float32(code - op.zero) - low
                store_float(target + 4 * (block * BLOCK_INPUTS + i), value * op.scale)
