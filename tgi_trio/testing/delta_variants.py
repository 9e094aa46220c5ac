"""Every kind of launch of the kernels of causal convolutions and delta rules."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.shard.torch_backend.kernels import convolving, delta_rule
from tgi_trio.shard.torch_backend.states import delta_rule_layer
from tgi_trio.testing.variant import BF16, F32, I32, I64, Variant

_BOOL = "*i1"  # a pointer to such
_KEY_HEADS, _VALUE_HEADS, _DIM = 16, 32, 128
_CHANNELS = (2 * _KEY_HEADS + _VALUE_HEADS) * _DIM


def delta_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    yield from _convolutions()
    yield from _decodes()


def _convolutions() -> Iterator[Variant]:
    for decodes in (False, True):
        yield Variant(
            f"convolve bf16 4 {'decodes' if decodes else 'prompts'}",
            convolving.convolve,
            (F32, *(BF16,) * 4, I64, I64 if decodes else I32, I64, I64, _BOOL, *("i32",) * 3),
            {
                **{"CHANNELS": _CHANNELS, "BLOCK": 512, "TILE": 8, "TAPS": 4, "DILATION": 1},
                **{"HAS_BIAS": False, "SILU": True, "DECODES": decodes},
            },
        )


def _decodes() -> Iterator[Variant]:
    for by_channel, bounded in ((False, False), (True, False), (True, True)):
        more = f"{' by channel' * by_channel}{' bounded' * bounded}"
        yield Variant(
            f"step_delta_rule bf16 {_DIM}{more}",
            delta_rule.step_delta_rule,
            (
                *(BF16, F32, BF16, BF16, BF16, *(F32,) * 4, I64, I64, _BOOL),
                *(*("fp32",) * 4, *("i32",) * 3),
            ),
            {
                **{"HEADS": _VALUE_HEADS, "KEY_HEADS": _KEY_HEADS, "TILED": False},
                **{"KEY": _DIM, "PADDED_KEY": _DIM, "VALUE": _DIM, "PADDED_VALUE": _DIM},
                **{"BY_CHANNEL": by_channel, "BOUNDED": bounded, "SILU": not by_channel},
            },
            warps=delta_rule_layer.count_warps(_DIM, _DIM),
        )
