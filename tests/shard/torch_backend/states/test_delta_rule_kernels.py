"""Kernels of decodes by the delta rule, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.states import convolution, delta_rule_layer
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.delta_rule_layer import DeltaRuleLayer
from tgi_trio.shard.torch_backend.states.steps import StateSteps

need_triton()

KEY_HEADS, VALUE_HEADS, KEY, VALUE, HIDDEN, SLOTS = 2, 4, 12, 20, 32, 8
CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
KINDS: dict[str, dict[str, Any]] = {
    "Qwen 3 Next": {"taps": 4},
    "sigmoid": {"taps": 2, "gate": "sigmoid"},
    "GGUF": {"taps": 4, "tiled": True},
    "Kimi": {"taps": 4, "by_channel": True, "channel_rank": 6},
    "bounded": {"taps": 3, "by_channel": True, "channel_rank": 6, "least_decay": -3.0},
    "Ling": {"taps": 4, "by_channel": True, "gate": "sigmoid", "least_decay": -5.0},
    "reversing": {"taps": 4, "beta_scale": 2.0},
}


def some(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer_of(kind: dict[str, Any], dtype: torch.dtype) -> DeltaRuleLayer:
    layout: Any = "stacked"
    mixer = DeltaRule(KEY_HEADS, VALUE_HEADS, KEY, VALUE, layout=layout, norm_eps=1e-5, **kind)
    rank, values = mixer.channel_rank, VALUE_HEADS * VALUE
    decays = KEY if mixer.by_channel else 1
    width = CHANNELS + (2 * rank + VALUE_HEADS if rank else values + VALUE_HEADS * (1 + decays))

    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        return Linear(some(outputs, inputs, seed=seed, dtype=dtype))

    return DeltaRuleLayer(
        mixer,
        inner=linear(width, HIDDEN, 1),
        decay_up=linear(VALUE_HEADS * decays, rank, 2) if rank else None,
        gate_up=linear(values, rank, 3) if rank else None,
        convolution=CausalConvolution(some(CHANNELS, mixer.taps, seed=4, dtype=dtype)),
        rate=some(VALUE_HEADS, 1, seed=5).exp(),
        decay_bias=some(VALUE_HEADS, decays, seed=6),
        norm=some(VALUE, seed=7),
        output=linear(HIDDEN, values, 8),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """From slot to slot, one in its place, one from nothing; and padding rows share a slot."""
    layer = layer_of(KINDS[kind], dtype)
    reads, writes = (
        torch.tensor(of, device=DEVICE) for of in ([1, 4, 5, 3, 0, 0], [2, 4, 6, 7, 0, 0])
    )
    fresh = torch.tensor([False, False, False, True, True, True], device=DEVICE)
    steps = StateSteps(list(range(7)), reads, writes, fresh)
    x = some(6, HIDDEN, seed=9, dtype=dtype)
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for launches in (False, True):
        for module in (convolution, delta_rule_layer):
            monkeypatch.setattr(module, "runs_kernels", lambda _, launches=launches: launches)
        monkeypatch.setattr(convolution, "_BLOCK", 64)  # several programs a row
        states = {
            "recurrence": some(SLOTS, VALUE_HEADS, KEY, VALUE, seed=10),
            "tail": some(SLOTS, layer.mixer.taps - 1, CHANNELS, seed=11, dtype=dtype),
        }
        said = [layer.mix(x, states, steps) for _ in range(2)]
        found.append((torch.stack(said)[:, :4], states))
    (wanted, theirs), (mine, ours) = found
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for name in theirs:
        torch.testing.assert_close(
            ours[name][1:], theirs[name][1:], atol=tolerance, rtol=tolerance, equal_nan=False
        )
    torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)
