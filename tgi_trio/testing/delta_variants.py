"""Every kind of launch of the kernels of causal convolutions and delta rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from tgi_trio.shard.torch_backend.kernels.states import convolving, delta_chunks, delta_rule
from tgi_trio.shard.torch_backend.states.delta_rule_kernels import (
    BLOCK,
    PART,
    TILE,
    choose_chunk_tile,
    count_warps,
    pad,
)
from tgi_trio.testing.variant import BF16, F32, I32, I64, TYPES, Variant

_BOOL = "*i1"  # a pointer to such
_KEY_HEADS, _VALUE_HEADS, _DIM = 16, 32, 128
_CHANNELS = (2 * _KEY_HEADS + _VALUE_HEADS) * _DIM


def delta_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    yield from _convolutions()
    yield from _rules()
    yield from _chunks()


def _convolutions() -> Iterator[Variant]:
    for decodes, gated in product((False, True), (False, True)):
        places = I64 if decodes else I32  # decodes read none
        yield Variant(
            f"convolve bf16 4 {'decodes' if decodes else 'prompts'}{' gated' * gated}",
            convolving.convolve,
            (BF16 if gated else F32, *(BF16,) * 6, I64, places, I64, I64, _BOOL, *("i32",) * 3),
            {
                **{"CHANNELS": _CHANNELS, "WIDTH": 512, "TILE": 8, "TAPS": 4, "DILATION": 1},
                **{"BIASED": False, "SILU": not gated, "GATED": gated, "DECODES": decodes},
            },
        )


def _rules() -> Iterator[Variant]:
    for by_channel, bounded in ((False, False), (True, False), (True, True)):
        more = f"{' by channel' * by_channel}{' bounded' * bounded}"
        shape = _shape(_DIM, _DIM, by_channel)
        gated = {"PADDED_VALUE": _DIM, "BOUNDED": bounded, "SILU": not by_channel}
        for listed in (False, True):
            yield Variant(
                f"step_delta_rule bf16 {_DIM}{more}{' beside prompts' * listed}",
                delta_rule.step_delta_rule,
                (
                    *(BF16, F32, BF16, BF16, BF16, *(F32,) * 4, I64, I64, _BOOL, I64, I64),
                    *(*("fp32",) * 4, *("i32",) * 3),
                ),
                shape | gated | {"LISTED": listed},
                warps=count_warps(_DIM, _DIM),
            )


def _chunks() -> Iterator[Variant]:
    for key, value in ((64, 64), (96, 192), (128, 128), (256, 128)):
        for by_channel, bounded in ((False, False), (True, False), (True, True)):
            for dtype in (BF16, F32):
                if key == _DIM or not bounded:
                    yield from _cut_rows(dtype, key, value, by_channel, bounded)
    for placed in (True, False):
        yield Variant(
            f"open_outputs bf16 {_DIM}{'' if placed else ' batch invariant'}",
            delta_chunks.open_outputs,
            (BF16, F32, BF16, F32, I32 if placed else F32, "fp32", "i32", "i32"),
            {
                **{"HEADS": _VALUE_HEADS, "FIRST": 2 * _KEY_HEADS * _DIM, "VALUE": _DIM},
                **{"PADDED_VALUE": _DIM, "TILE": TILE, "SILU": True, "PLACED": placed},
            },
        )


def _cut_rows(
    dtype: torch.dtype, key: int, value: int, by_channel: bool, bounded: bool
) -> Iterator[Variant]:
    """Yield what rows of prompts are moved by; bounded decays are those of other chunks only."""
    more = f"{TYPES[dtype]} {key} {value}{' by channel' * by_channel}{' bounded' * bounded}"
    tile = choose_chunk_tile(dtype, key)
    shape = _shape(key, value, by_channel)
    shape |= {"SIZE": tile.tokens, "PRECISION": tile.precision}
    yield Variant(
        f"prepare_chunks {more}",
        delta_chunks.prepare_chunks,
        (*(*(F32,) * 5, dtype, dtype, F32, F32, I64, I64), *(*("fp32",) * 3, *("i32",) * 2)),
        {
            **(shape | {"BLOCK_KEY": min(BLOCK, pad(key)), "PADDED_VALUE": pad(value)}),
            **{"BLOCK_VALUE": min(BLOCK, pad(value)), "BOUNDED": bounded, "SOLVES": tile.solves},
        },
        stages=1,
    )
    if not bounded:
        yield Variant(
            f"run_chunks {more}",
            delta_chunks.run_chunks,
            (*(F32,) * 6, *(I64,) * 4, _BOOL),
            shape | {"BLOCK_KEY": min(tile.block, pad(key)), "BLOCK_VALUE": PART},
            stages=1,
        )


def _shape(key: int, value: int, by_channel: bool) -> dict[str, Any]:
    """Return the constants that all of a layer's kernels share."""
    return {
        **{"HEADS": _VALUE_HEADS, "KEY_HEADS": _VALUE_HEADS if by_channel else _KEY_HEADS},
        **{"KEY": key, "PADDED_KEY": pad(key), "VALUE": value},
        **{"TILED": False, "BY_CHANNEL": by_channel},
    }
