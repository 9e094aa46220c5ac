"""Kernels of the delta rule, against torch's operations and transformers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.states import rows_support
from tests.shard.torch_backend.states.rows_support import Slots, refill, send
from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states import convolution, delta_rule_layer
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.delta_rule_kernels import DeltaRuleKernels, Projected
from tgi_trio.shard.torch_backend.states.delta_rule_layer import DeltaRuleLayer
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.testing.stand_in_driver import Counts

need_triton()

KEY_HEADS, VALUE_HEADS, KEY, VALUE, HIDDEN, SLOTS = 2, 4, 12, 20, 32, 8
EPS = 1e-2  # so that norms do not enlarge what is hardly there, and what differs by rounding
CHANNELS = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
LENGTHS = (70, 1, 16, 64, 1, 3)
ROWS = Slots([1, 2, 3, 4, 5, 6], [7, 2, 3, 8, 9, 10], [False, False, False, True, True, False])
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
    """Return numbers that bfloat16 has as well, so that layers of two dtypes are the same."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().to(DEVICE, dtype)


def layer_of(kind: dict[str, Any], dtype: torch.dtype) -> DeltaRuleLayer:
    layout: Any = "stacked"
    mixer = DeltaRule(KEY_HEADS, VALUE_HEADS, KEY, VALUE, layout=layout, norm_eps=EPS, **kind)
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


def both(
    monkeypatch: pytest.MonkeyPatch,
    layer: DeltaRuleLayer,
    x: torch.Tensor,
    states: dict[str, torch.Tensor],
    steps: StateSteps,
    times: int = 1,
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return outputs and states of torch's operations, then those of kernels."""
    found = []
    for launches in (False, True):
        monkeypatch.setattr(convolution, "_BLOCK", 64)  # several programs a row
        for module in (convolution, delta_rule_layer):
            monkeypatch.setattr(module, "runs_kernels", lambda _, launches=launches: launches)
        own = {name: state.clone() for name, state in states.items()}
        found.append(
            (torch.stack([layer.mix(layer.inner(x), own, steps) for _ in range(times)]), own)
        )
    return found


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
    states = {
        "recurrence": some(SLOTS, VALUE_HEADS, KEY, VALUE, seed=10),
        "tail": some(SLOTS, layer.mixer.taps - 1, CHANNELS, seed=11, dtype=dtype),
    }
    found = both(monkeypatch, layer, x, states, steps, times=2)
    (wanted, theirs), (mine, ours) = found
    wanted, mine = wanted[:, :4], mine[:, :4]
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for name in theirs:
        torch.testing.assert_close(
            ours[name][1:], theirs[name][1:], atol=tolerance, rtol=tolerance, equal_nan=False
        )
    torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance)


def prompts(
    dtype: torch.dtype, taps: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor], StateSteps]:
    """Return rows that end within a chunk, at its end and behind it, decodes, and fresh ones."""
    states = {
        "recurrence": some(11, VALUE_HEADS, KEY, VALUE, seed=10),
        "tail": some(11, taps - 1, CHANNELS, seed=11, dtype=dtype),
    }
    x = some(sum(LENGTHS), HIDDEN, seed=9, dtype=dtype)
    return x, states, ROWS.launched(LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    layer = layer_of(KINDS[kind], torch.float32)
    x, states, steps = prompts(torch.float32, layer.mixer.taps)
    (wanted, theirs), (mine, ours) = both(monkeypatch, layer, x, states, steps)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine, wanted, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kind", ["Qwen 3 Next", "Kimi"])
def test_half_precision_is_as_near_as_torchs(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    exact = layer_of(KINDS[kind], torch.float32)
    taps = exact.mixer.taps
    (wanted, _), _ = both(monkeypatch, exact, *prompts(torch.float32, taps))
    layer = layer_of(KINDS[kind], torch.bfloat16)
    found = both(monkeypatch, layer, *prompts(torch.bfloat16, taps))
    theirs, ours = ((made.float() - wanted).abs() for made, _ in found)
    assert ours.mean() < 1.05 * theirs.mean() < 0.1 * wanted.abs().mean()


@pytest.mark.parametrize("kind", ["Qwen 3 Next", "Kimi"])
def test_recordings_have_room_for_any_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And what is left over is no row's."""
    for module in (convolution, delta_rule_layer):
        monkeypatch.setattr(module, "runs_kernels", lambda _: True)
    layer = layer_of(KINDS[kind], torch.float32)
    x, states, steps = prompts(torch.float32, layer.mixer.taps)
    wanted = {name: state.clone() for name, state in states.items()}
    said = layer.mix(layer.inner(x), wanted, steps)
    padded = torch.cat((x, some(9, HIDDEN, seed=12)))
    steps, rows = ROWS.recorded(LENGTHS, len(padded))
    layer.mix(layer.inner(padded), {name: state.clone() for name, state in states.items()}, steps)
    for lengths in ((1,) * 6, LENGTHS):
        found = {name: state.clone() for name, state in states.items()}
        refill(rows, lengths)
        made = layer.mix(layer.inner(padded), found, steps)
    assert torch.equal(made[: len(x)], said) and not made[len(x) :].any()
    assert all(torch.equal(found[name][1:], wanted[name][1:]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, KEY])
def test_it_is_the_rule_of_transformers(channels: int, dtype: torch.dtype) -> None:
    """Of rows from hardly anything to all but everything forgotten, of keys that are alike.

    In half precision, products of which are less precise, outputs are as near as their dtype is.
    """
    torch.manual_seed(channels)
    tokens, shape = 150, (VALUE_HEADS, KEY)
    query, key = torch.randn(2, tokens, *shape)
    key[40:80] = key[40] + torch.randn(40, *shape) / 100
    value = torch.randn(tokens, VALUE_HEADS, VALUE)
    decay = torch.randn(tokens, VALUE_HEADS, channels).sign() * 6 - 4
    beta, gate = torch.randn(tokens, VALUE_HEADS), torch.randn(tokens, VALUE_HEADS * VALUE)
    gate = gate.to(dtype)
    layout: Any = "stacked"
    rank = 0 if channels == 1 else 4
    mixer = DeltaRule(
        *(VALUE_HEADS, VALUE_HEADS, KEY, VALUE, 4, layout, EPS), channel_rank=rank, beta_scale=2.0
    )
    rate = torch.linspace(0.1, 3, VALUE_HEADS, device=DEVICE)[:, None]
    bias = torch.zeros(VALUE_HEADS, channels, device=DEVICE)
    kernels = DeltaRuleKernels(mixer, VALUE_HEADS, rate, bias)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
    own = Projected(*(part.to(DEVICE) for part in (mixed, gate, beta, decay.flatten(1))))
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    steps = StateSteps([0, tokens], slot, slot, slot == 0, send)
    states = torch.full((1, VALUE_HEADS, KEY, VALUE), torch.nan, device=DEVICE)
    norm = torch.ones(VALUE, device=DEVICE)
    found = kernels.launch(own, norm, states, steps)
    logarithm = -rate.cpu() * functional.softplus(decay)
    rule = torch_chunk_gated_delta_rule if channels == 1 else chunk_kimi_delta_attention
    wanted, last = rule(
        *(part[None].double() for part in (query, key, value)),
        (logarithm.squeeze(-1) if channels == 1 else logarithm)[None].double(),
        2 * beta.sigmoid()[None].double(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    normed = functional.rms_norm(wanted[0].float(), (VALUE,), None, EPS)
    within = 1e-4 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(states.cpu(), last.float(), atol=within, rtol=within)
    opened = normed.flatten(1) * functional.silu(gate.float())
    away = (found.cpu().float() - opened).abs()
    assert away.mean() < 1.02 * (opened.to(dtype) - opened).abs().mean() + 1e-5
    torch.testing.assert_close(
        away, away * 0, atol=2e-4 if dtype is torch.float32 else 0.02, rtol=0
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="a stand-in is for machines without a device")
@pytest.mark.parametrize(("kind", "products"), [("Qwen 3 Next", 2), ("Kimi", 4)])
def test_prompts_are_five_launches_between_products(
    monkeypatch: pytest.MonkeyPatch, kind: str, products: int
) -> None:
    """However many rows and tokens there are; without decodes they are four."""
    from tgi_trio.testing.stand_in_device import StandInDevice  # it imports Triton

    with StandInDevice() as device:
        for module in (sys.modules[__name__], rows_support):
            monkeypatch.setattr(module, "DEVICE", "cuda:0")
        layer = layer_of(KINDS[kind], torch.bfloat16)
        x, states, steps = prompts(torch.bfloat16, layer.mixer.taps)
        alone = Slots([1], [7], [True]).launched([70])
        for given, count in ((steps, 5), (alone, 4)):
            device.counts = Counts()
            layer.mix(layer.inner(x[: given.tokens]), states, given)
            assert device.counts.launches.total() == products + count, device.counts.launches
