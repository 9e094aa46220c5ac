"""Every kind of launch of the kernels for entries and hyper-connections: DeepSeek V4, Hunyuan 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.entries import entries_kernel
from tgi_trio.shard.torch_backend.attention.entries.paged_entries import REGISTERS
from tgi_trio.shard.torch_backend.attention.entries.shared_keys import COPIED, count_averaged
from tgi_trio.shard.torch_backend.attention.paged.tiles import choose_entries_tile
from tgi_trio.shard.torch_backend.kernels.attention import shared_key
from tgi_trio.shard.torch_backend.kernels.streams import hyper_connections
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import FLOAT32_PRODUCTS, Generation
from tgi_trio.testing.variant import BF16, F32, I32, I64, TYPES, Variant

_DIM: Final = 512
_KEPT: Final = {4: 2560, 128: 1024, 0: 0}  # numbers behind a token's key, by tokens of a run


def entries_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    for variant in _variants():
        constants = variant.constants | {"OVERLAPS": generation == "hopper"}
        yield replace(variant, constants=constants)


def _variants() -> Iterator[Variant]:
    for dtype in (BF16, F32):
        for heads in (16, 64) if dtype is BF16 else (64,):
            for divided in (True, False):
                for rate in _KEPT:
                    yield _attend(dtype, heads, rate, divided)
        for rate in _KEPT:
            yield _write(dtype, rate)
    for hidden in (4096, 7168):
        yield from _streams(hidden)


def _attend(dtype: torch.dtype, heads: int, rate: int, divided: bool) -> Variant:
    most, seen = 512 if rate == 4 else 0, f"of {rate}" if rate else "in windows"
    tile = choose_entries_tile(dtype, heads, chosen=most > 0)
    return Variant(
        f"attend_entries {TYPES[dtype]} h{heads} {seen}{' divided' if divided else ''}",
        entries_kernel.attend_entries,
        (dtype, F32, F32, F32, *(dtype,) * 4, *(I32,) * 7, F32, "i32", "fp32", "fp32"),
        {
            **{"HEADS": heads, "DIM": _DIM, "PADDED_DIM": _DIM, "ROTARY": 64},
            # Behind them lie the queries of an index, with 64 heads.
            "QUERY": heads * _DIM + (64 * 128 if most else 0),
            **{
                "STRIDE": _DIM + _KEPT[rate],
                "WINDOW": 128,
                "RATE": rate,
                "ENTRY": 1024 if rate == 4 else 512,
                "MOST": most,
            },
            **{"SINKS": True, "PAGE": 16},
            **{"LANES": tile.lanes, "KEYS": tile.keys, "DIVIDED": divided},
        },
        warps=tile.warps,
        stages=tile.stages,
        registers=None if dtype is F32 else REGISTERS,
    )


def _write(dtype: torch.dtype, rate: int) -> Variant:
    heads, overlaps = 64 if rate == 4 else 0, rate == 4
    tokens = 2 * rate if overlaps else rate
    index = 128 if overlaps else _DIM if rate else 0  # what is not there is never launched
    return Variant(
        f"write_shared_keys {TYPES[dtype]}{f' for runs of {rate}' if rate else ''}",
        shared_key.write_shared_keys,
        (
            *(dtype, dtype, F32, *(dtype,) * 3, I64, *(I32,) * 5, F32, F32, dtype, F32),
            *(*(dtype,) * 3, *("fp32",) * 5, "i32"),
        ),
        {
            **{"QUERY": 1024, "PADDED_QUERY": 1024, "DIM": _DIM, "PADDED_DIM": _DIM},
            **{"ROTARY": 64, "KEPT": _KEPT[rate], "HEADS": heads, "PADDED_HEADS": heads},
            **{"KIND": "rms", "BLOCK": COPIED, "PAGE": 16},
            **{"ENTRIES": 2 if overlaps else int(rate > 0), "RATE": rate},
            "OVERLAPPING": overlaps,
            "AVERAGED": count_averaged(tokens, _DIM) if rate else 0,
            **{"INDEX_DIM": index, "INDEX_PADDED_DIM": index},
            "INDEX_BEGIN": 2048 if overlaps else 1024,
            "INDEX_AVERAGED": count_averaged(tokens, index) if rate else 0,
        },
    )


def _streams(hidden: int) -> Iterator[Variant]:
    padded = next_power_of_2(hidden)
    for tokens in (1, 1024):
        few, depth = hyper_kernels.choose_tile(tokens)
        tile: dict[str, Any] = {"PADDED": 32, "TOKENS": few, "DEPTH": depth}
        tile["PRECISION"] = FLOAT32_PRODUCTS
        yield Variant(
            f"mix_streams {hidden} of {few} tokens",
            hyper_connections.mix_streams,
            (F32, BF16, F32, "i32"),
            {"SIZE": 4 * hidden, "WEIGHTS": 24} | tile,
        )
        for mixes, experts in ((True, 0), (True, 6), (False, 0), (False, 8)):
            more = f"{'' if mixes else ' apart'}{f' of {experts} experts' * (experts > 0)}"
            yield Variant(
                f"write_streams {hidden} of {few} tokens{more}",
                hyper_connections.write_streams,
                (BF16, F32, *(BF16,) * 5, F32, F32, F32, "i32"),
                {"COUNT": 4, "HIDDEN": hidden, "MIXES": mixes}
                | {"PER_TOKEN": experts, "SHARED": int(experts > 0)}
                | {"HAS_GATE": False, "BESIDE": False, "WEIGHTS": 24 if mixes else 8}
                | tile,
            )
    for iterations in (20, 0):
        yield Variant(
            f"read_streams {hidden}{'' if iterations else ' apart'}",
            hyper_connections.read_streams,
            (BF16, F32, F32, F32, BF16, F32, F32, BF16, BF16, *("fp32",) * 5, "i32"),
            {
                **{"COUNT": 4, "PADDED": 4, "ADDS": True},
                **{"MOST_SHARES": hyper_kernels.MOST_SHARES},
                **{"ITERATIONS": iterations, "HIDDEN": hidden, "PADDED_HIDDEN": padded},
                **{"KIND": "rms", "HAS_GAIN": True, "HAS_BIAS": False},
            },
            warps=count_warps(padded),
        )
