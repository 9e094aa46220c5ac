"""Every kind of launch of the LoRA kernels, for the linears of decoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tgi_trio.shard.torch_backend.kernels import adapters
from tgi_trio.shard.torch_backend.layers.slotted_linear import (
    RANKS_TOGETHER,
    AdapterTile,
    choose_adapter_tiles,
)
from tgi_trio.testing.variant import BF16, EVEN, F16, F32, I32, TYPES, Variant


def adapter_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on devices of any generation."""
    for dtype in (BF16, F16, F32):
        for size, tile in zip(("few", "many"), choose_adapter_tiles(dtype), strict=True):
            for pieces, ranks in ((1, 64), (2, 64), (3, 64), (5, 64), (3, 16)):
                if dtype is F16 and (pieces, ranks) != (3, 64):
                    continue
                if dtype is F32 and pieces == 5:  # an index beside attention
                    continue
                yield from _pair(dtype, size, tile, pieces, ranks)
    # Numbers of inputs and outputs that are not multiples of 16, as on some ranks.
    yield from _pair(BF16, "few", choose_adapter_tiles(BF16).few, 3, 64, even="")
    yield from _pair(BF16, "many", choose_adapter_tiles(BF16).many, 3, 64, even="")


def _pair(
    dtype: torch.dtype, size: str, tile: AdapterTile, pieces: int, ranks: int, even: str = EVEN
) -> Iterator[Variant]:
    name = f"{TYPES[dtype]} {size} p{pieces} r{ranks}{'' if even else ' odd'}"
    slots = (dtype, I32, I32, "i32", f"i32{even}", f"i32{EVEN}", "i32", "i32")
    shared: dict[str, Any] = {"PIECES": pieces, "RANKS": ranks, "ROWS": tile.rows}
    yield Variant(
        f"shrink_rows {name}",
        adapters.shrink_rows,
        (F32, dtype, *slots),
        {**shared, "STEP": min(tile.ranks, ranks & -ranks), "DEPTH": tile.inputs},
        warps=tile.warps,
        stages=tile.stages,
    )
    yield Variant(
        f"expand_rows {name}",
        adapters.expand_rows,
        (dtype, F32, *slots, "i32", "i32", I32, "i32"),
        {**shared, "OUTPUTS": tile.outputs, "DEPTH": RANKS_TOGETHER},
        warps=tile.warps,
        stages=tile.stages,
    )
