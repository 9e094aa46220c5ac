"""Every kind of launch of the LoRA kernels, for the linears of decoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tgi_trio.shard.torch_backend.kernels.adapters import latent_adapters, linear_adapters
from tgi_trio.shard.torch_backend.kernels.experts import expert_adapters
from tgi_trio.shard.torch_backend.layers.adapters.slotted_embeddings import (
    ADDED_COLUMNS,
    ADDED_ROWS,
    COPIED,
)
from tgi_trio.shard.torch_backend.layers.adapters.slotted_latents import ROWS, choose_step
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (
    RANKS_TOGETHER,
    AdapterTile,
    choose_adapter_tiles,
)
from tgi_trio.shard.torch_backend.layers.experts.slotted_experts import SPREAD
from tgi_trio.testing.variant import BF16, EVEN, F16, F32, I32, I64, TYPES, Variant


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
    yield Variant(
        "place_embeddings bf16",
        linear_adapters.place_embeddings,
        (BF16, I64, I64, BF16, I32, f"i32{EVEN}"),
        {"RANKS": 64, "PADDED": 64, "BLOCK": COPIED},
    )
    for dtype, ranks, gains in ((BF16, 16, True), (BF16, 256, False), (F32, 64, True)):
        sizes: dict[str, Any] = {"RANKS": ranks, "PADDED": ranks, "ROWS": ADDED_ROWS}
        yield Variant(
            f"add_embeddings {TYPES[dtype]} r{ranks}{' gains' if gains else ''}",
            linear_adapters.add_embeddings,
            (dtype, I64, dtype, dtype, dtype, I32, I32, f"i32{EVEN}", f"i32{EVEN}"),
            {"GAINS": gains, **sizes, "COLUMNS": ADDED_COLUMNS},
        )
    for dtype, ranks in ((BF16, 16), (BF16, 64), (BF16, 256), (F16, 16), (F32, 64)):
        for keys in (True, False):
            yield _heads(dtype, ranks, keys=keys)
    scalars = "i32", "i32"
    yield Variant(
        "spread_slots", expert_adapters.spread_slots, (I32, I32, *scalars), {"BLOCK": SPREAD}
    )
    for dtype in (BF16, F32):
        for size, tile in zip(("few", "many"), choose_adapter_tiles(dtype), strict=True):
            yield from _members(dtype, size, tile, gathers=True, pieces=2, ranks=16)
            yield from _members(dtype, size, tile, gathers=False, pieces=1, ranks=64)


def _pair(
    dtype: torch.dtype, size: str, tile: AdapterTile, pieces: int, ranks: int, even: str = EVEN
) -> Iterator[Variant]:
    name = f"{TYPES[dtype]} {size} p{pieces} r{ranks}{'' if even else ' odd'}"
    slots = (dtype, I32, I32, "i32", f"i32{even}", f"i32{EVEN}", "i32", "i32")
    shared: dict[str, Any] = {"PIECES": pieces, "RANKS": ranks, "ROWS": tile.rows}
    yield Variant(
        f"shrink_rows {name}",
        linear_adapters.shrink_rows,
        (F32, dtype, *slots),
        {**shared, "STEP": min(tile.ranks, ranks & -ranks), "DEPTH": tile.inputs},
        warps=tile.warps,
        stages=tile.stages,
    )
    yield Variant(
        f"expand_rows {name}",
        linear_adapters.expand_rows,
        (dtype, F32, *slots, "i32", "i32", I32, "i32"),
        {**shared, "OUTPUTS": tile.outputs, "DEPTH": RANKS_TOGETHER},
        warps=tile.warps,
        stages=tile.stages,
    )


def _heads(dtype: torch.dtype, ranks: int, *, keys: bool) -> Variant:
    """Return what adapts one of both products of heads with what expands DeepSeek's latents."""
    step = choose_step(ranks, dtype)
    return Variant(
        f"adapt_heads {TYPES[dtype]} {'keys' if keys else 'values'} r{ranks}",
        latent_adapters.adapt_heads,
        (dtype, dtype, dtype, I32, I32, *[f"i32{EVEN}"] * 3, "i32", "i32"),
        {
            **{"KEYS": keys, "PLAIN": 128, "EACH": 256, "RANKS": ranks, "ROWS": ROWS},
            **{"INPUTS": 128 if keys else 512, "OUTPUTS": 512 if keys else 128},
            **{"DEPTH": step, "COLUMNS": step},
        },
    )


def _members(
    dtype: torch.dtype, size: str, tile: AdapterTile, *, gathers: bool, pieces: int, ranks: int
) -> Iterator[Variant]:
    """Yield what adapts one of both products of 128 experts, of which a token has eight."""
    name = f"{TYPES[dtype]} {size} p{pieces} r{ranks}"
    slots = (dtype, I32, I32, I32, I32, "i32", f"i32{EVEN}", f"i32{EVEN}", "i32", "i32")
    shared: dict[str, Any] = {"EACH": 8, "GATHERS": gathers, "GROUPS": 128, "PADDED_GROUPS": 128}
    shared |= {"PIECES": pieces, "RANKS": ranks, "ROWS": tile.rows}
    yield Variant(
        f"shrink_members {name}",
        expert_adapters.shrink_members,
        (F32, dtype, *slots),
        {**shared, "PER_ROW": 8, "STEP": min(tile.ranks, ranks & -ranks), "DEPTH": tile.inputs},
        warps=tile.warps,
        stages=tile.stages,
    )
    yield Variant(
        f"expand_members {name}",
        expert_adapters.expand_members,
        (dtype, F32, *slots, "i32"),
        {
            **shared,
            "PARTS": 4 if size == "few" else 1,
            "OUTPUTS": tile.outputs,
            "DEPTH": RANKS_TOGETHER,
        },
        warps=tile.warps,
        stages=tile.stages,
    )
