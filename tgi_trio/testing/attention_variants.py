"""Every kind of launch of the attention kernels, for the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.paged import (
    latent_kernel,
    merging_kernel,
    paged_kernel,
    tiling_kernel,
)
from tgi_trio.shard.torch_backend.attention.paged.tiles import (
    choose_latent_tile,
    choose_tile,
    pad_dim,
)
from tgi_trio.shard.torch_backend.attention.paged.tiling import count_listed
from tgi_trio.shard.torch_backend.kernels.attention import expanding
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS
from tgi_trio.shard.torch_backend.layers.attention.expanding import choose_expanding_tile
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, F32, I32, TYPES, U8, Variant

_MANY: Final = 64  # rows of decodes

# What layers may have beside plain attention to all that is before a token.
FEATURES: Final[tuple[dict[str, Any], ...]] = (
    {"WINDOW": 4096},
    {"SOFT_CAP": True},
    {"ALIBI": True},
    {"SINKS": True, "WINDOW": 128},
    {"AHEAD": True, "WINDOW": 4096},
    {"CHUNK": 8192},
)

# Heads whose results have gates, and how many neighbouring numbers each opens: Qwen 3.5, Step 3.5.
GATED: Final = ((256, 1), (128, 128))


def attention_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    cases: list[tuple[int, torch.dtype, dict[str, Any]]] = [
        (dim, dtype, {}) for dim in (64, 80, 96, 128, 192, 256, 512) for dtype in (BF16, F32)
    ]
    cases += [(128, dtype, kind) for kind in FEATURES for dtype in (BF16, F32)]
    cases += [(128, BF16, {"CODES": word}) for word in EIGHT_BITS]
    cases += [(dim, BF16, {"CODES": "fp8_e4m3fn"}) for dim in (64, 256)]
    cases += [(256, BF16, {"SOFT_CAP": True, "WINDOW": 4096}), (64, BF16, FEATURES[3])]
    cases += [(512, BF16, {"CODES": word}) for word in EIGHT_BITS]
    cases += [(512, BF16, {"SINKS": True, "WINDOW": 128}), (320, BF16, {})]
    narrow = {"VALUE": 128, "PADDED_VALUE": 128}  # MiMo-V2-Flash's
    cases += [(192, dtype, narrow) for dtype in (BF16, F32)]
    cases += [(dim, BF16, {"EACH": each}) for dim, each in GATED]
    cases += [(192, BF16, narrow | more) for more in (FEATURES[3], {"CODES": "fp8_e4m3fn"})]
    for dim, dtype, kind in cases:
        for decodes in (True, False):
            for group, divided in ((4, False), (4, True), (7, False)):
                if (group == 7 and dim != 128) or ("EACH" in kind and (divided or group == 7)):
                    continue
                rows = _MANY if decodes else 0
                yield _attend(generation, dtype, dim, group, rows, divided, kind)
        if dtype is BF16 and dim == 64 and "CODES" not in kind:  # another tile
            yield _attend(generation, dtype, dim, 4, 1, True, kind)
    for dtype, heads, decodes, codes in (
        (BF16, 16, True, ""),
        (BF16, 16, False, ""),
        (BF16, 128, True, ""),
        (F32, 16, True, ""),
        *((BF16, 128, decodes, word) for decodes in (True, False) for word in EIGHT_BITS),
    ):
        for divided in (True, False):
            yield attend_latents(dtype, heads, decodes, divided, codes)
    for decodes, divided in ((True, True), (True, False), (False, False)):  # Mistral 4
        yield attend_latents(BF16, 32, decodes, divided, "", scales=True)
    overlaps = generation == "hopper"
    for dim, each in (*((dim, 0) for dim in (64, 128, 256, 512)), *GATED):
        yield Variant(
            f"merge_parts bf16 {dim}{f' each {each}' if each else ''}",
            merging_kernel.merge_parts,
            (BF16, F32, F32, F32, BF16 if each else F32, "i32", "i32"),
            {"HEADS": 16, "DIM": dim, "PADDED_DIM": dim, "MOST": 32, "EACH": each}
            | {"OVERLAPS": overlaps},
            warps=4 if dim > 256 else 2,
        )
    yield from _expand()
    for rows in (64, 256, 1024):
        for lanes, above, upto in ((128, 16, 0), (16, 0, 16)):
            yield Variant(
                f"list_tiles {rows} rows, {lanes} lanes",
                tiling_kernel.list_tiles,
                (I32, I32, I32, "i32", "i32"),
                {
                    **{"GROUP": 4, "LANES": lanes, "ABOVE": above, "UPTO": upto},
                    **{"ROWS": rows, "BLOCK": count_listed(rows)},
                },
            )


def _attend(
    generation: Generation,
    dtype: torch.dtype,
    dim: int,
    group: int,
    decodes: int,
    divided: bool,
    kind: dict[str, Any],
) -> Variant:
    eight_bits = "CODES" in kind
    sizes = dim, kind.get("VALUE", dim)
    tile = choose_tile(dtype, *sizes, generation, decodes=decodes, eight_bits=eight_bits)
    constants = {
        "KV_HEADS": 8,
        "GROUP": group,
        "DIM": dim,
        "PADDED_DIM": pad_dim(dim),
        "VALUE": dim,
        "PADDED_VALUE": pad_dim(dim),
        "PAGE": 16,
        "LANES": tile.lanes,
        "KEYS": tile.keys,
        "DIVIDED": divided,
        "WINDOW": 0,
        "CHUNK": 0,
        "SOFT_CAP": False,
        "ALIBI": False,
        "SINKS": False,
        "AHEAD": False,
        "EACH": 0,
        "CODES": "",
        "OVERLAPS": generation == "hopper",
    }
    cached = U8 if eight_bits else dtype
    mode = "decode" if decodes else "prefill"
    mode += " of one row" if decodes == 1 else ""
    named = ({"DIVIDED": True} if divided else {}) | kind
    named.pop("PADDED_VALUE", None)
    said = {"CODES": kind.get("CODES"), "VALUE": f"value {sizes[1]}"}
    said["EACH"] = f"each {kind.get('EACH')}"
    more = "".join(f" {said.get(name, name.lower())}" for name in named)
    tables = (I32,) * 6 + (F32, F32, I32, dtype)  # the latter: slopes, sinks, lasts and gates
    return Variant(
        f"attend_tile {mode} {TYPES[dtype]} {dim} g{group}{more}",
        paged_kernel.attend_tile,
        (dtype, *(F32,) * 3, dtype, cached, cached, *tables, *("fp32",) * 3, *("i32",) * 3),
        constants | kind,
        warps=tile.warps,
        stages=tile.stages,
    )


def _expand() -> Iterator[Variant]:
    """Yield values of latents: of 64 heads, merged, and with gates."""
    cases = ((BF16, 1, 32, 0), (BF16, 16, 8, 0), (BF16, 16, 8, 1), (BF16, 512, 1, 1))
    for dtype, tokens, parts, each in (*cases, (BF16, 512, 1, 128), (F32, 1, 32, 1)):
        tile = choose_expanding_tile(dtype, tokens * parts)
        merges = parts > 1
        more = f"{f' of {parts} parts' if merges else ''}{f' each {each}' if each else ''}"
        yield Variant(
            f"expand_values {TYPES[dtype]} 512 to 128{more}",
            expanding.expand_values,
            (dtype, F32 if merges else dtype, F32, F32, dtype, dtype, *("i32",) * 4),
            {"HEADS": 64, "RANK": 512, "VALUE": 128, "MERGES": merges, "PARTS": parts}
            | {"EACH": each, "ROWS": max(tile.rows, parts)}
            | {"OUTPUTS": tile.outputs, "DEPTH": tile.depth},
            warps=tile.warps,
            stages=tile.stages,
        )


def attend_latents(
    dtype: torch.dtype,
    heads: int,
    decodes: bool,
    divided: bool,
    codes: str,
    *,
    rotary: int = 64,
    index: int = 0,
    sinks: bool = False,
    page: int = 16,
    scales: bool = False,
) -> Variant:
    """Return attention over latents of 512 numbers, behind which an index may have some more."""
    tile = choose_latent_tile(dtype, heads, decodes=decodes)
    mode = "decode" if decodes else "prefill"
    more = f"{' divided' if divided else ''}{f' {codes}' if codes else ''}"
    more += f"{f' of {512 + rotary + index}' if index else ''}{' sinks' if sinks else ''}"
    more += " scaled" * scales
    return Variant(
        f"attend_latents {mode} {TYPES[dtype]} 512+{rotary} h{heads}{more}",
        latent_kernel.attend_latents,
        (
            *(dtype, F32, F32, F32),
            *(*(dtype,) * 4, U8 if codes else dtype),
            *(*(I32,) * 6, F32, *(dtype,) * 3, "fp32", "fp32", *("i32",) * 4),
        ),
        {
            "HEADS": heads,
            "RANK": 512,
            "PADDED_RANK": 512,
            "ROTARY": rotary,
            "PADDED_ROTARY": pad_dim(rotary),
            "WIDTH": 512 + rotary + index,
            "ROTATES": True,
            "INTERLEAVED": True,
            "PAGE": page,
            "LANES": tile.lanes,
            "KEYS": tile.keys,
            "DIVIDED": divided,
            "SINKS": sinks,
            "SCALES": scales,
            "CODES": codes,
        },
        warps=tile.warps,
        stages=tile.stages,
    )
