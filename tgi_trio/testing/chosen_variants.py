"""Every kind of launch of the kernels that choose what attention sees, for well-known models."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.shard.torch_backend.attention.selecting import (
    KEYS,
    LISTED,
    PART,
    READ,
    READERS,
    REGISTERS,
    SAMPLE,
    tokens_of,
)
from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels import index_scores, selecting
from tgi_trio.testing.variant import BF16, F32, I32, TYPES, U8, Variant


def chosen_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    for heads, unit, most, weighted in (  # DeepSeek V3.2 and GLM 5; DeepSeek V4; Qwen 4
        *((64, 1, 2048, True), (32, 1, 2048, True)),
        *((64, 4, 512, True), (16, 64, 32, False)),
    ):
        for decodes in (True, False):
            yield _score(heads, unit, most, decodes, weighted=weighted)
    yield _score(64, 1, 2048, True, weighted=True, codes="fp8_e4m3fn")
    yield _score(64, 1, 2048, False, weighted=True, codes="fp8_e4m3fn")
    for unit, most, tail, heads in (
        *((1, 2048, False, 1), (16, 128, True, 1), (0, 512, False, 1)),  # 0: nothing is listed
        *((64, 32, True, 1), (128, 16, False, 4)),
    ):
        for divided in (True, False) if unit < 64 else (False,):
            yield _select(unit, most, tail, heads, divided)


def _select(unit: int, most: int, tail: bool, heads: int, divided: bool) -> Variant:
    width = most * unit + (unit - 1 if tail else 0)
    listed = f" of {unit}{' with tail' if tail else ''} for {heads}" if unit else ""
    return Variant(
        f"select_best {most}{listed}{' divided' if divided else ''}",
        selecting.select_best,
        (*(I32,) * 4, F32, *(I32,) * 9, *("i32",) * 3),
        {
            **{"MOST": most, "UNIT": max(1, unit), "TAIL": tail, "HEADS": heads, "WIDTH": width},
            **{"PAGE": 16, "LISTED": LISTED if unit else 1, "PART": PART, "BLOCK": READ},
            **{"PROGRAMS": READERS if divided else 0, "SAMPLE": SAMPLE},
        },
        warps=16,
    )


def _score(
    heads: int, unit: int, most: int, decodes: bool, *, weighted: bool, codes: str = ""
) -> Variant:
    tokens, padded = tokens_of(heads, decodes=decodes)
    mode = "decode" if decodes else "prefill"
    weights = F32 if weighted else BF16
    return Variant(
        f"score_units {mode} {TYPES[BF16]} h{heads} of {unit}{f' {codes}' if codes else ''}",
        index_scores.score_units,
        (F32, I32, BF16, weights, U8 if codes else BF16, *(I32,) * 5, *("i32",) * 7),
        {
            **{"HEADS": heads, "PADDED_HEADS": padded, "DIM": 128, "PADDED_DIM": pad_dim(128)},
            **{"UNIT": unit, "MOST": most, "WEIGHTED": weighted, "TOKENS": tokens},
            **{"KEYS": KEYS, "PAGE": 16, "CODES": codes},
        },
        registers=REGISTERS,
    )
