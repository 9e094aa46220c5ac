"""Every kind of launch of the kernels that choose blocks of tokens, for MiniMax-M3 and Qwen 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tgi_trio.shard.torch_backend.attention.index_writing import BESIDE
from tgi_trio.shard.torch_backend.attention.paged_blocks import KEYS, tokens_of
from tgi_trio.shard.torch_backend.attention.projecting import count_heads
from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels import block_scores, index_keys
from tgi_trio.testing.variant import BF16, F32, I32, I64, TYPES, U8, Variant

_DIM = 128  # of an index's heads


def block_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
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
        keys = U8 if codes else BF16
        yield Variant(
            f"write_index_heads bf16 h{heads}{more}",
            index_keys.write_index_heads,
            (
                *(BF16, keys, BF16, BF16, BF16, I64, F32, F32, BF16, BF16),
                *(I32 if turns else keys, I64, *(I32,) * 5, *("fp32",) * 3, "i32"),
            ),
            {
                **{"HEADS": heads, "DIM": _DIM, "PADDED_DIM": _DIM, "ROTARY": 64},
                **{"INTERLEAVED": False, "SIZE": size, "TURNS": turns},
                **{"BESIDE": min(BESIDE, pad_dim(size)) if size else 0, "PAGE": 16},
                **{"CODES": codes, "BLOCK": count_heads(_DIM)},
            },
        )


def _score(dtype: torch.dtype, codes: str, decodes: bool) -> Variant:
    tokens, padded = tokens_of(dtype, 4, decodes=decodes)
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
