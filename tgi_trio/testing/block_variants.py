"""Every kind of launch of the kernels that choose blocks of tokens, for MiniMax-M3 and Qwen 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tgi_trio.shard.torch_backend.attention.indexed.index_writing import BESIDE
from tgi_trio.shard.torch_backend.attention.indexed.paged_blocks import KEYS, choose_tile_tokens
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import count_heads
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import block_scores, index_keys
from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.variant import BF16, F32, I32, I64, TYPES, U8, Variant

_DIM = 128  # of an index's heads


def block_variants(generation: Generation) -> Iterator[Variant]:
    """Yield the variants that are launched on devices of a generation."""
    for dtype, codes in ((BF16, ""), (BF16, "fp8_e4m3fn"), (F32, "")):
        for decodes in (True, False):
            yield _score(dtype, codes, decodes)
    for heads, size, codes, turns in (  # Qwen 4's positions have three parts
        *((4, 0, "", False), (4, 0, "fp8_e4m3fn", False)),
        *((16, 64, "", True), (16, 64, "fp8_e4m3fn", True)),
        *((16, 64, "", False), (16, 4, "", False)),
    ):
        more = f" blocks of {size}" if size else ""
        more += f"{' turned' if turns else ''}{codes and ' ' + codes}"
        keys, dim = U8 if codes else BF16, 256 if size else 128
        own, of_keys = (32, 2) if size else (64, 4)
        block = count_heads(dim)
        yield Variant(
            f"write_heads_and_index bf16 {dim} h{heads}{more}",
            index_keys.write_heads_and_index,
            (
                *(BF16, keys, keys, *(BF16,) * 3, I64, F32, BF16, BF16, *("fp32",) * 5, "i32"),
                *(BF16, keys, BF16, F32, F32, BF16, BF16),
                *(I32 if turns else keys, I64, *(I32,) * 5, *("fp32",) * 2, "i32"),
            ),
            {
                **{"HEADS": own, "KV_HEADS": of_keys, "DIM": dim, "VALUE": dim, "PADDED_DIM": dim},
                **{"ROTARY": 64, "INTERLEAVED": False, "CLIPS": False, "NORM": "rms_plus_one"},
                **{"NORM_LAST": False, "HAS_BIAS": False, "SCALES_QUERIES": False},
                **{"KEYS_AS_VALUES": False, "VALUE_NORM": False, "CODES": codes, "FIRST": 0},
                **{"BLOCK": block, "PROGRAMS": -(-(own + 2 * of_keys) // block)},
                **{"INDEX_HEADS": heads, "INDEX_DIM": _DIM, "INDEX_PADDED_DIM": _DIM},
                **{"INDEX_BLOCK": count_heads(_DIM), "SIZE": size, "TURNS": turns, "PAGE": 16},
                "BESIDE": min(BESIDE, pad_dim(size)) if size else 0,
                "OVERLAPS": generation == "hopper",
            },
        )


def _score(dtype: torch.dtype, codes: str, decodes: bool) -> Variant:
    tokens, padded = choose_tile_tokens(dtype, 4, decodes=decodes)
    mode = "decode" if decodes else "prefill"
    return Variant(
        f"score_blocks {mode} {TYPES[dtype]} h4 of 128{codes and ' ' + codes}",
        block_scores.score_blocks,
        (F32, I32, dtype, U8 if codes else dtype, *(I32,) * 5, *("i32",) * 5),
        {
            **{"HEADS": 4, "PADDED_HEADS": padded, "DIM": _DIM, "PADDED_DIM": _DIM},
            **{"SIZE": 128, "MOST": 16, "LOCAL": 1, "TOKENS": tokens, "KEYS": KEYS},
            **{"PAGE": 16, "CODES": codes},
        },
    )
