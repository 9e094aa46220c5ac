"""Every kind of launch of the kernels of Mamba-2, Mamba and recurrent gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tgi_trio.shard.torch_backend.kernels.states import mamba1, mamba2, recurrent_gate
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.states import mamba1_layer, mamba2_layer, recurrent_gate_layer
from tgi_trio.testing.variant import BF16, F32, I64, TYPES, Variant

_SLOTS = (I64, I64, "*i1")  # read, written, and whether there is nothing before
_HEADS, _GROUPS, _DIM = 128, 8, 64
_CHANNELS = 8192


def recurrence_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    yield from _mamba2()
    yield from _mamba1()
    yield from _gates()


def _mamba2() -> Iterator[Variant]:
    own: dict[str, Any] = {"HEADS": _HEADS, "GROUPS": _GROUPS, "DIM": _DIM}
    scalars = ("i32", "i32", *("fp32",) * 4)
    # Zamba 2; Nemotron-H, Granite 4, Bamba; Falcon H1 with and without norms.
    for state, gated in ((64, False), (128, False), (256, False), (256, True)):
        sizes = own | {"STATE": state, "PADDED_STATE": state, "GATED": gated}
        read, more = BF16 if gated else F32, " gated" * gated
        yield Variant(
            f"step_mamba2 bf16 {state}{more}",
            mamba2.step_mamba2,
            (read, *(BF16,) * 3, *(F32,) * 4, *_SLOTS, *scalars),
            sizes | {"BLOCK": mamba2_layer.count_stepped(state, _DIM)},
        )
        for dtype in (torch.bfloat16, torch.float32):
            yield _scan(dtype, sizes, gated=gated)
    for size, before in ((1024, False), (8192, False), (8192, True)):
        yield Variant(
            f"finish_mamba2 bf16 {size}{' before gate' * before}",
            mamba2.finish_mamba2,
            (BF16, F32, BF16, F32, "i32", "fp32", "fp32"),
            {"GROUPS": _HEADS * _DIM // size, "SIZE": size, "PADDED": size, "BEFORE": before},
            warps=count_warps(size),
        )


def _scan(dtype: torch.dtype, sizes: dict[str, Any], *, gated: bool) -> Variant:
    """Return what takes prompts through Mamba-2 in models of a dtype."""
    state = sizes["STATE"]
    tile = mamba2_layer.choose_scan_tile(state, dtype)
    return Variant(
        f"scan_mamba2 {TYPES[dtype]} {state}{' gated' * gated}",
        mamba2.scan_mamba2,
        (
            *(dtype if gated else F32, *(dtype,) * 3, I64, *(F32,) * 4, *_SLOTS),
            *("i32", "i32", *("fp32",) * 4),
        ),
        {
            **(sizes | {"BLOCK": tile.numbers, "BLOCK_STATE": min(tile.state, state)}),
            **{"LENGTH": tile.tokens, "PRECISION": tile.precision},
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _mamba1() -> Iterator[Variant]:
    for decodes in (False, True):
        tile = mamba1_layer.choose_tile(16, decodes=decodes)
        yield Variant(
            f"scan_mamba1 bf16 16 {'decodes' if decodes else 'prompts'}",
            mamba1.scan_mamba1,
            (*(BF16,) * 5, I64, *(F32,) * 4, *_SLOTS, *("i32",) * 3),
            {
                **{"CHANNELS": _CHANNELS, "STATE": 16, "PADDED_STATE": 16},
                **{"BLOCK": tile.channels, "LENGTH": tile.tokens, "DECODES": decodes},
            },
            warps=tile.warps,
        )
    for gains in (False, True):
        yield Variant(
            f"normalise_selected bf16 256{' weighted' * gains}",
            mamba1.normalise_selected,
            (*(BF16,) * 3, "fp32"),
            {"RANK": 256, "PADDED_RANK": 256, "STATE": 16, "PADDED_STATE": 16, "HAS_GAINS": gains},
            warps=1,
        )


def _gates() -> Iterator[Variant]:
    layer = recurrent_gate_layer
    for tokens in (layer.FEW, layer.MANY):
        sizes: dict[str, Any] = {
            **{"HEADS": 10, "DIM": 256, "TOKENS": tokens, "PRECISION": "tf32"},
            **{"BLOCK": layer.PART, "INPUTS": layer.INPUTS},
        }
        yield Variant(
            f"open_gates bf16 256 {tokens} tokens",
            recurrent_gate.open_gates,
            (F32, F32, BF16, *(F32,) * 5, "i32"),
            sizes,
        )
        yield Variant(
            f"step_gated bf16 256 {tokens} tokens",
            recurrent_gate.step_gated,
            (BF16, BF16, *(F32,) * 5, BF16, F32, *_SLOTS, "i32", "i32"),
            sizes | {"ACT": "gelu_tanh"},
        )
    yield Variant(
        "scan_gated bf16",
        recurrent_gate.scan_gated,
        (BF16, F32, F32, BF16, I64, F32, *_SLOTS, "i32"),
        {"CHANNELS": 2560, "BLOCK": layer.CHANNELS, "LENGTH": layer.LENGTH, "ACT": "gelu_tanh"},
    )
