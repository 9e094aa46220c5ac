"""Every kind of launch that is for batch invariance alone, for the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.entries import entries_kernel
from tgi_trio.shard.torch_backend.attention.paged import spans_kernel
from tgi_trio.shard.torch_backend.attention.paged.spans import SPAN
from tgi_trio.shard.torch_backend.attention.paged.tiles import (
    choose_entry_spans_tile,
    choose_latent_spans_tile,
    choose_spans_tile,
    pad_dim,
)
from tgi_trio.shard.torch_backend.kernels.linears import any_rows
from tgi_trio.shard.torch_backend.kernels.sampling import log_totals
from tgi_trio.shard.torch_backend.kernels.states import token_by_token
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS
from tgi_trio.shard.torch_backend.layers.linears.plain_product import (
    choose_any_tile,
    count_input_parts,
)
from tgi_trio.shard.torch_backend.prompt_logprobs import TOTALS_BLOCK
from tgi_trio.shard.torch_backend.states.delta_rule_kernels import pad
from tgi_trio.shard.torch_backend.states.walking import CHANNELS, WARPS, count_walked
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.attention_variants import FEATURES
from tgi_trio.testing.entries_variants import entries_variants
from tgi_trio.testing.variant import BF16, EVEN, F32, I32, I64, TYPES, U8, Variant

_TABLES: Final = (I32,) * 6
_CODES: Final[tuple[dict[str, Any], ...]] = ({}, *({"CODES": word} for word in EIGHT_BITS))
_ROWS: Final = (I64, I64, I64, "*i1", "i32")  # begin, read, written, fresh, and whether listed


def invariant_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    yield from _products(generation)
    yield from _attention(generation)
    yield from _latents()
    yield from _entries(generation)
    yield from _states()
    for dim in (64, 128, 256, 512):
        for sinks in (False, True) if dim == 64 else (False,):
            yield Variant(
                f"merge_spans bf16 {dim}{' sinks' if sinks else ''}",
                spans_kernel.merge_spans,
                (BF16, F32, F32, F32, I32, "i32", F32),
                {"HEADS": 32, "DIM": dim, "PADDED_DIM": dim, "SINKS": sinks},
                warps=2,
            )
    yield Variant(
        "find_log_totals",
        log_totals.find_log_totals,
        (F32, F32, "i32", f"i32{EVEN}"),
        {"BLOCK": TOTALS_BLOCK},
    )


def _products(generation: Generation) -> Iterator[Variant]:
    """Attention's output and gates of Llama 8B, the expansion of latents, DeepSeek V4's groups."""
    many = f"i32{EVEN}"
    together, apart = (many, many, "1"), (many, "1", many)  # neighbouring inputs of the matrix
    for dtype in (BF16, F32):
        for outputs, inputs, plain, strides in (
            *((4096, 4096, True, together), (28672, 4096, True, together)),
            *((512, 128, False, apart), (1024, 4096, False, together)),
        ):
            tile = choose_any_tile(dtype, generation, by_head=not plain)
            parts = count_input_parts(outputs, inputs, tile) if plain else 1
            for divided in (True, False) if parts > 1 else (False,):
                more = f"{' divided' if divided else ''}{'' if plain else ' by head'}"
                constants = {
                    "INPUTS": inputs,
                    "HAS_BIAS": not divided,
                    "DIVIDED": divided,
                    "PARTS": parts,
                    "ROWS": tile.rows,
                    "OUTPUTS": tile.outputs,
                    "DEPTH": tile.depth,
                }
                names = ("weight_batch", "weight_output", "weight_input")
                constants |= {
                    name: 1 for name, kind in zip(names, strides, strict=True) if kind == "1"
                }
                kinds = [kind for kind in strides]
                yield Variant(
                    f"multiply_any {TYPES[dtype]} {inputs} {parts} parts{more}",
                    any_rows.multiply_any,
                    (dtype, F32, dtype, dtype, dtype, "i32", "i32", *(many,) * 4, *kinds),
                    constants,
                    warps=tile.warps,
                    stages=tile.stages,
                )


def _attention(generation: Generation) -> Iterator[Variant]:
    cases: list[tuple[int, torch.dtype, dict[str, Any]]] = [
        (dim, dtype, {}) for dim in (64, 80, 128, 256, 512) for dtype in (BF16, F32)
    ]
    cases += [(128, BF16, kind) for kind in FEATURES]
    cases += [(64, BF16, FEATURES[3]), (256, BF16, FEATURES[0] | FEATURES[1])]
    cases += [(dim, BF16, {"CODES": word}) for dim in (64, 128, 256, 512) for word in EIGHT_BITS]
    # Over lists of tokens, of each KV head (MiniMax-M3) or of all (Qwen 4).
    for dim, kv_heads in ((128, 1), (256, 2)):
        listed = {"PAGE": 1, "KV_HEADS": kv_heads, "GROUP": 16, "OVERLAPS": False}
        cases += [(dim, BF16, listed | kind) for kind in _CODES]
    for dim, dtype, kind in cases:
        tile = choose_spans_tile(dtype, dim, dim)
        cached = U8 if "CODES" in kind else dtype
        said = {"CODES": kind.get("CODES", ""), "PAGE": "chosen"}
        said |= dict.fromkeys(("KV_HEADS", "GROUP", "OVERLAPS"), "")
        words = (said.get(name, name.lower()) for name in kind)
        more = "".join(f" {word}" for word in words if word)
        for divided in (True, False):
            yield Variant(
                f"attend_spans {TYPES[dtype]} {dim}{' divided' if divided else ''}{more}",
                spans_kernel.attend_spans,
                (
                    *(dtype, F32, F32, F32, I32, "i32", dtype, cached, cached, *_TABLES),
                    *(F32, F32, I32, *("fp32",) * 3, "i32", "i32"),
                ),
                {
                    **{"KV_HEADS": 8, "GROUP": 4, "DIM": dim, "PADDED_DIM": pad_dim(dim)},
                    **{"VALUE": dim, "PADDED_VALUE": pad_dim(dim), "PAGE": 16},
                    **{"LANES": tile.lanes, "KEYS": tile.keys, "DIVIDED": divided, "SPAN": SPAN},
                    **{"WINDOW": 0, "CHUNK": 0, "SOFT_CAP": False, "ALIBI": False},
                    **{"SINKS": False, "AHEAD": False, "CODES": ""},
                    "OVERLAPS": generation == "hopper",
                }
                | kind,
                warps=tile.warps,
                stages=tile.stages,
            )


def _latents() -> Iterator[Variant]:
    """DeepSeek V3's, then over lists of tokens, behind whose latents are index keys."""
    cases = [(BF16, ""), (F32, ""), *((BF16, word) for word in EIGHT_BITS)]
    for (dtype, codes), chosen in product(cases, (False, True)):
        tile = choose_latent_spans_tile(dtype)
        for divided in (True, False):
            more = f"{' divided' if divided else ''}{f' {codes}' if codes else ''}"
            more += " chosen" if chosen else ""
            yield Variant(
                f"attend_latent_spans {TYPES[dtype]} 512+64{more}",
                spans_kernel.attend_latent_spans,
                (
                    *(dtype, F32, F32, F32, I32, "i32", *(dtype,) * 4, U8 if codes else dtype),
                    *(*_TABLES, F32, "fp32", "fp32", *("i32",) * 4),
                ),
                {
                    **{"HEADS": 128, "RANK": 512, "PADDED_RANK": 512},
                    **{"ROTARY": 64, "PADDED_ROTARY": 64, "ROTATES": True, "INTERLEAVED": True},
                    **{"WIDTH": 704 if chosen else 576, "PAGE": 1 if chosen else 16},
                    **{"LANES": tile.lanes, "KEYS": tile.keys},
                    **{"DIVIDED": divided, "SPAN": SPAN, "SINKS": False, "CODES": codes},
                },
                warps=tile.warps,
                stages=tile.stages,
            )


def _entries(generation: Generation) -> Iterator[Variant]:
    """DeepSeek V4's, of which an index chooses, or all of which are seen; and windows alone."""
    for attend in entries_variants(generation):
        if attend.kernel is not entries_kernel.attend_entries or "h16" in attend.name:
            continue
        dtype = attend.arguments[0]
        assert isinstance(dtype, torch.dtype)
        tile = choose_entry_spans_tile(dtype, 64, chosen=attend.constants["MOST"] > 0)
        yield replace(
            attend,
            name=attend.name.replace("attend_entries", "attend_entry_spans").replace(" h64", ""),
            kernel=entries_kernel.attend_entry_spans,
            arguments=(*attend.arguments[:4], I32, "i32", *attend.arguments[4:]),
            constants=attend.constants
            | {"SPAN": SPAN, "LANES": tile.lanes, "QUERY": 64 * attend.constants["DIM"]},
            stages=tile.stages,
        )


def _states() -> Iterator[Variant]:
    """Recurrences token by token: Qwen 3.5, Kimi Linear, OLMo; Mamba-2 as in `_mamba2`; others."""
    for key, value, by_channel, bounded in (
        *((64, 64, False, False), (96, 192, False, False), (128, 128, False, False)),
        *((256, 128, False, False), (128, 128, True, False), (128, 128, True, True)),
    ):
        yield Variant(
            f"walk_delta_rule bf16 {key} {value}{' by channel' * by_channel}{' bounded' * bounded}",
            token_by_token.walk_delta_rule,
            (F32, BF16, BF16, F32, F32, F32, *_ROWS, *("fp32",) * 3, "i32", "i32"),
            {
                **{"HEADS": 32, "KEY_HEADS": 32 if by_channel else 16, "KEY": key},
                **{"PADDED_KEY": pad(key), "VALUE": value, "TILED": False},
                **{"BLOCK": count_walked(pad(key), pad(value))},
                **{"BY_CHANNEL": by_channel, "BOUNDED": bounded},
            },
            warps=WARPS,
        )
    for state, gated in ((64, False), (128, False), (256, False), (256, True)):
        yield Variant(
            f"walk_mamba2 bf16 {state}{' gated' * gated}",
            token_by_token.walk_mamba2,
            (
                *(BF16 if gated else F32, *(BF16,) * 3, *(F32,) * 4, *_ROWS),
                *("i32", "i32", *("fp32",) * 4),
            ),
            {
                **{"HEADS": 128, "GROUPS": 8, "DIM": 64, "STATE": state, "PADDED_STATE": state},
                **{"BLOCK": count_walked(state, 64), "GATED": gated},
            },
            warps=WARPS,
        )
    yield Variant(
        "walk_mamba1 bf16 16",
        token_by_token.walk_mamba1,
        (*(BF16,) * 5, *(F32,) * 4, *_ROWS, *("i32",) * 3),
        {"CHANNELS": 8192, "STATE": 16, "PADDED_STATE": 16, "BLOCK": CHANNELS},
        warps=WARPS,
    )
    yield Variant(
        "walk_gated bf16",
        token_by_token.walk_gated,
        (BF16, F32, F32, BF16, F32, *_ROWS, "i32"),
        {"CHANNELS": 2560, "BLOCK": CHANNELS, "ACT": "gelu_tanh"},
        warps=WARPS,
    )
