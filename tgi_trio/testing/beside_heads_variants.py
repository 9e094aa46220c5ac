"""Every kind of launch of heads with what is beside them: of Falcon H1 and of Gemma 3n."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tgi_trio.shard.torch_backend.attention.paged.kv_writing import count_heads
from tgi_trio.shard.torch_backend.kernels.attention import beside_heads
from tgi_trio.shard.torch_backend.layers.detour import expansion_constants
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, F32, I32, I64, TYPES, U8, Variant

_BOOL = "*i1"  # a pointer to such
_RANK, _HIDDEN = 64, 2048  # of Gemma 3n's detour
_CHANNELS = 3072 + 2 * 256  # of Falcon H1 7B


def beside_heads_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    overlaps = {"OVERLAPS": generation == "hopper"}
    for dtype, codes in ((BF16, ""), (F32, ""), (BF16, "fp8_e4m3fn")):
        for decodes in (True, False):
            yield Variant(
                f"rotate_and_convolve {_name(dtype, codes)} {'decodes' if decodes else 'prompts'}",
                beside_heads.rotate_and_convolve,
                (
                    *_heads(dtype, codes),
                    *(*(dtype,) * 7, I64, I64 if decodes else I32, I64, I64, _BOOL),
                    *("i32",) * 4,
                ),
                _of_heads(12, 2, 128, "", codes)
                | {"CHANNELS": _CHANNELS, "WIDTH": 512, "TILE": 8, "TAPS": 4, "DILATION": 1}
                | {"BIASED": True, "SILU": True, "GATED": False, "DECODES": decodes}
                | overlaps,
            )
        for tokens in (1, 1024) if dtype is BF16 else (1,):
            yield Variant(
                f"rotate_and_expand {_name(dtype, codes)} {'many' if tokens > 1 else 'few'} tokens",
                beside_heads.rotate_and_expand,
                (*_heads(dtype, codes), *(dtype,) * 3, *("i32",) * 3),
                _of_heads(8, 2, 256, "rms", codes)
                | {"SIZE": _HIDDEN, "RANK": _RANK}
                | expansion_constants(dtype, _RANK, tokens)
                | overlaps,
            )


def _name(dtype: torch.dtype, codes: str) -> str:
    return f"{TYPES[dtype]}{f' {codes}' if codes else ''}"


def _heads(dtype: torch.dtype, codes: str) -> tuple[Any, ...]:
    """Return the arguments of `rotate_and_write`."""
    cache = U8 if codes else dtype
    return (dtype, cache, cache, *(dtype,) * 3, I64, *(dtype,) * 3, *("fp32",) * 5, "i32")


def _of_heads(heads: int, kv_heads: int, dim: int, norm: str, codes: str) -> dict[str, Any]:
    block = count_heads(dim)
    return {
        **{"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "VALUE": dim, "PADDED_DIM": dim},
        **{"ROTARY": dim, "INTERLEAVED": False, "CLIPS": False, "NORM": norm, "NORM_LAST": False},
        **{"HAS_BIAS": False, "SCALES_QUERIES": False, "KEYS_AS_VALUES": False},
        **{"VALUE_NORM": norm != "", "CODES": codes, "FIRST": 0, "BLOCK": block},
        "PROGRAMS": -(-(heads + 2 * kv_heads) // block),
    }
