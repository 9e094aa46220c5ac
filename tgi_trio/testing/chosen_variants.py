"""Every kind of launch of the kernels that choose what attention sees, for well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.indexed.absorbing import absorbing_constants
from tgi_trio.shard.torch_backend.attention.indexed.selecting import (
    KEYS,
    LISTED,
    PART,
    READ,
    READERS,
    REGISTERS,
    SAMPLE,
    choose_tile_tokens,
    describe_turn,
)
from tgi_trio.shard.torch_backend.kernels.attention import absorbing, index_scores, selecting
from tgi_trio.testing.variant import BF16, F32, I32, TYPES, U8, Variant


class _Index(NamedTuple):
    """How a model's index asks, for keys of 128 numbers."""

    name: str
    heads: int
    unit: int = 1
    most: int = 2048
    rotary: int = 64
    begin: int = 0
    interleaved: bool = False
    scales: bool = False
    weights: torch.dtype = BF16
    weighted: bool = True
    codes: bool = False  # whether keys of eight bits are among the variants
    attending: int = 0  # heads of attention over latents, whose queries are absorbed beside
    plain: int = 128  # numbers of these that are


_INDICES: Final = (
    _Index("DeepSeek V3.2", 64, codes=True, attending=128),
    _Index("GLM 5", 32, attending=64, plain=192),
    _Index("Hunyuan 4", 16, begin=64, attending=32),
    _Index("GLM 5.3", 32, unit=16, most=128, rotary=0, attending=32),
    _Index("Mistral Large 4", 32, interleaved=True, scales=True, attending=64),
    _Index("Mistral Large 4 without rotation", 32, rotary=0, scales=True, attending=64),
    _Index("DeepSeek V4", 64, unit=4, most=512, begin=64, interleaved=True, weights=F32),
    _Index("Qwen 4", 16, unit=64, most=32, rotary=0, weighted=False),
)


def chosen_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    for index in _INDICES:
        for decodes in (True, False):
            for codes in ("", "fp8_e4m3fn") if index.codes else ("",):
                alone = _score(index, decodes, codes)
                yield alone
                if index.attending:
                    yield _absorb_beside(alone, index)
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


def _absorb_beside(alone: Variant, index: _Index) -> Variant:
    """Return a variant that scores, with programs that absorb queries of attention."""
    return replace(
        alone,
        name=alone.name.replace("score_units", "score_and_absorb"),
        kernel=absorbing.score_and_absorb,
        arguments=(*alone.arguments, *(BF16,) * 3, *("i32",) * 4),
        constants=alone.constants | absorbing_constants(BF16, index.attending, index.plain, 512),
    )


def _score(index: _Index, decodes: bool, codes: str = "") -> Variant:
    tokens, padded = choose_tile_tokens(index.heads, decodes=decodes)
    mode = "decode" if decodes else "prefill"
    stored = U8 if codes else BF16
    return Variant(
        f"score_units {mode} {TYPES[BF16]} {index.name}{f' {codes}' if codes else ''}",
        index_scores.score_units,
        (F32, I32, BF16, index.weights, *(BF16,) * 5, stored, *(I32,) * 5, *("i32",) * 7),
        {
            **{"HEADS": index.heads, "PADDED_HEADS": padded, "DIM": 128, "PADDED_DIM": 128},
            **{"UNIT": index.unit, "MOST": index.most, "WEIGHTED": index.weighted},
            **describe_turn(128, index.rotary, index.begin, interleaved=index.interleaved),
            **{"SCALES": index.scales, "TOKENS": tokens},
            **{"KEYS": KEYS, "PAGE": 16, "CODES": codes},
        },
        registers=REGISTERS,
    )
