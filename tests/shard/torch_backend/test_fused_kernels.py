"""Kernels of what lies between two products, against torch's operations they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import LatentSpec, QueryScale, RotarySpec
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS, Xielu
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
    add_normalise_and_widen,
)

need_triton()

from tgi_trio.shard.torch_backend.attention.paged.kv_writing import (  # noqa: E402
    absorb_queries,
    count_heads,
    write_latent_keys,
    write_projected,
)
from tgi_trio.shard.torch_backend.layers import gating, opening, residual  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, HIDDEN = 3, 96
KINDS: tuple[Any, ...] = ("rms", "rms_plus_one", "layer")


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have the kernels run where they are interpreted, until `undo`."""
    for module in (gating, opening, residual):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    return monkeypatch


def agree(ours: torch.Tensor, theirs: torch.Tensor, last_bits: int = 1) -> None:
    """Both round at the same places; sums are in another order, so a last bit may differ."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype is torch.float32:
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
        return
    bits = 7 if ours.dtype is torch.bfloat16 else 10
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=2.0 ** (last_bits - bits))


def make_norm(kind: Any, dtype: torch.dtype, *, plain: bool = False) -> Norm:
    if plain:
        return Norm(kind, None, None, 1e-5, HIDDEN)
    bias = some(HIDDEN, seed=8, dtype=dtype) if kind == "layer" else None
    return Norm(kind, some(HIDDEN, seed=9, dtype=dtype), bias, 1e-5, HIDDEN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [False, True], ids=["weighed", "plain"])
def test_sums_and_their_norms(
    kernels: pytest.MonkeyPatch, kind: Any, dtype: torch.dtype, plain: bool
) -> None:
    x, first, second = (3.0 * some(TOKENS, HIDDEN, seed=i, dtype=dtype) for i in range(3))
    norm = make_norm(kind, dtype, plain=plain)
    inner = make_norm(kind, dtype)
    cases: list[tuple[Addends | None, Norm | None]] = [
        (None, norm),
        (Addends(first), norm),
        (Addends(first), None),
        (Addends(first, second, scale=0.3), norm),
        (Addends(first, second, scale=0.3, second_scale=0.7), norm),
        (Addends(first, norm=inner), norm),
        (Addends(first, second, factor=some(1, seed=4, dtype=dtype)), norm),
    ]
    ours = [add_and_normalise(x, *case) for case in cases]
    kernels.undo()
    for case, got in zip(cases, ours, strict=True):
        for one, other in zip(got, add_and_normalise(x, *case), strict=True):
            agree(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_comes_in_float32_as_well(kernels: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The very numbers that it has in the dtype."""
    x, more = some(TOKENS, HIDDEN, dtype=dtype), some(TOKENS, HIDDEN, seed=1, dtype=dtype)
    norm = make_norm("rms", dtype)
    summed, normed, wide = add_normalise_and_widen(x, Addends(more), norm)
    assert wide.dtype is torch.float32 and torch.equal(wide, normed.float())
    expected = add_and_normalise(x, Addends(more), norm)
    assert torch.equal(summed, expected[0]) and torch.equal(normed, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shared", "shared_gate", "apart"),
    [(0, False, False), (2, False, False), (1, True, False), (1, False, True), (1, True, True)],
)
def test_what_experts_found_is_added_up_and_then_added(
    kernels: pytest.MonkeyPatch, shared: int, shared_gate: bool, apart: bool, dtype: torch.dtype
) -> None:
    x = some(TOKENS, HIDDEN, dtype=dtype)
    parts = ExpertParts(
        some(TOKENS * (4 + shared), HIDDEN, seed=1, dtype=dtype),
        some(TOKENS, 4, seed=2, dtype=dtype).sigmoid(),
        some(TOKENS, 1, seed=3, dtype=dtype) if shared_gate else None,
        shared,
    )
    every = parts
    if apart:  # the same numbers: what a shared expert says lies elsewhere
        by_expert = parts.parts.unflatten(0, (TOKENS, -1))
        beside, routed = by_expert[:, 4].contiguous(), by_expert[:, :4].flatten(0, 1)
        parts = ExpertParts(routed, parts.weights, parts.gate_logits, 0, beside)
    norm, inner = make_norm("rms", dtype), make_norm("rms", dtype)
    cases = [(Addends(parts), norm), (Addends(parts), None), (Addends(parts, norm=inner), norm)]
    ours = [add_and_normalise(x, *case) for case in cases]
    kernels.undo()
    by_token = every.parts.unflatten(0, (TOKENS, -1)).float()
    whole = (by_token[:, :4] * parts.weights.float()[..., None]).sum(1)
    common = by_token[:, 4:].sum(1)
    whole += common if parts.gate_logits is None else parts.gate_logits.float().sigmoid() * common
    bits = {torch.float32: 20, torch.bfloat16: 7, torch.float16: 10}[dtype]
    for (addends, other), got in zip(cases, ours, strict=True):
        expected = add_and_normalise(x, addends._replace(first=whole.to(dtype)), other)
        for mine, theirs in zip(got, expected, strict=True):  # a sum of six, each rounded
            torch.testing.assert_close(mine, theirs, atol=8.0 * 2.0**-bits, rtol=4.0 * 2.0**-bits)


def test_widths_of_models_are_no_powers_of_two(kernels: pytest.MonkeyPatch) -> None:
    x, more = some(2, 4608), some(2, 4608, seed=1)
    norm = Norm("layer", some(4608, seed=2), some(4608, seed=3), 1e-5, 4608)
    ours = add_and_normalise(x, Addends(more), norm)
    kernels.undo()
    for one, other in zip(ours, add_and_normalise(x, Addends(more), norm), strict=True):
        agree(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gates(kernels: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """Activations that no kernel has are computed by torch."""
    inner = 2.0 * some(2, 2 * 1100, dtype=dtype)
    gate = gating.Gate(ACTIVATIONS[name])
    ours = gate(inner)
    kernels.undo()
    # torch rounds all of its steps; its erf in float32 is ten times less exact than the kernels',
    # and other on other processors.
    exact = dtype is torch.float32 and gating.name_activation(ACTIVATIONS[name])
    theirs = gate(inner.double()).to(dtype) if exact else gate(inner)
    agree(ours, theirs, 3 if name == "quick_gelu" else 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_gates_that_are_scaled(
    kernels: pytest.MonkeyPatch, limit: float, dtype: torch.dtype
) -> None:
    """In one launch; products leave them to it."""
    inner = 2.0 * some(2, 2 * 1100, dtype=dtype)
    gate = gating.Gate(ACTIVATIONS["silu"], limit=limit, scale=0.7)
    assert not gate.kernel
    launched: list[str] = []
    kernels.setattr(gating.Gate, "_launch", note(gating.Gate._launch, launched))
    ours = gate(inner)
    kernels.undo()
    assert launched == ["silu"]
    agree(ours, gate(inner), 2)


def note(launch: Any, launched: list[str]) -> Any:
    """Return `Gate._launch` that notes the activation's name."""

    def noted(gate: gating.Gate, inner: torch.Tensor, name: str) -> Any:
        launched.append(name)
        return launch(gate, inner, name)

    return noted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["relu2", "gelu_bloom", "quick_gelu", "xielu", "tanh"])
def test_activations_alone(kernels: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """Also near 0, where xIELU is the difference of numbers that are nearly alike."""
    x = torch.cat((3.0 * some(3, 1100), 1e-3 * some(2, 1100))).to(dtype)
    if name == "xielu":
        first, second, beta, eps = (
            torch.tensor([v], device=DEVICE) for v in (0.3, 0.7, 0.5, -1e-6)
        )
        act: Any = Xielu.of(*(each.to(dtype) for each in (first, second, beta, eps)))
    else:
        act = ACTIVATIONS[name]
    ours = gating.activate(act, x)
    exact = act(x.double())
    assert ours.dtype is dtype
    bits = {torch.float32: 21, torch.bfloat16: 8, torch.float16: 10}[dtype]
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=2.0**-bits)
    near = 2e-10 if dtype is torch.float32 else 3e-8
    torch.testing.assert_close(ours[3:].double(), exact[3:], atol=near, rtol=2.0**-bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("raised", [True, False])
def test_a_gate_with_limits(
    kernels: pytest.MonkeyPatch, paired: bool, raised: bool, dtype: torch.dtype
) -> None:
    inner = 4.0 * some(2, 2 * 1100, dtype=dtype)
    gate = gating.Gate(ACTIVATIONS["quick_gelu"], limit=3.0, paired=paired, raised=raised)
    assert gate.kernel
    ours = gate(inner)
    kernels.undo()
    agree(ours, gate(inner), 3)
    halves = inner.view(2, 1100, 2).unbind(-1) if paired else inner.chunk(2, -1)
    opened, up = halves[0].double().clamp(max=3.0), halves[1].double().clamp(-3.0, 3.0)
    exact = opened * torch.sigmoid(1.702 * opened) * (up + raised)
    torch.testing.assert_close(ours.double(), exact, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("each", [1, 25])
@pytest.mark.parametrize("in_float32", [False, True])
def test_opened_values(
    kernels: pytest.MonkeyPatch, each: int, in_float32: bool, dtype: torch.dtype
) -> None:
    """By number and by head; gates that are a part of what has been projected."""
    values, both = some(3, 1100, dtype=dtype), some(3, 7 + 1100 // each, dtype=dtype)
    gates = both[:, 7:]
    ours = opening.open_values(values, gates, in_float32=in_float32)
    kernels.undo()
    agree(ours, opening.open_values(values, gates, in_float32=in_float32), 1)
    exact = values.double() * gates.double().sigmoid().repeat_interleave(each, 1)
    torch.testing.assert_close(ours.double(), exact, atol=0.02, rtol=0.01)


def test_every_common_gate_is_a_kernel() -> None:
    known = {ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")}
    assert known <= set(gating._KERNELS)


HEADS, KV_HEADS, DIM = 6, 2, 24
LONG = {
    "short_factor": [1.0] * (DIM // 2),
    "long_factor": [3.0] * (DIM // 2),
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
SCALE = QueryScale(beta=0.5, step=8, offset=1)
ROTARIES: dict[str, dict[str, Any]] = {
    "halves": {"dim": DIM},
    "queries scaled by position": {"dim": DIM, "query_scale": SCALE},
    "not rotated, but scaled": {"dim": 0, "query_scale": SCALE},
    "interleaved": {"dim": DIM, "interleaved": True},
    "partial": {"dim": 8},
    "partial, interleaved": {"dim": 8, "interleaved": True},
    "dynamic": {"dim": DIM, "kind": "dynamic", "parameters": {"factor": 2.0}, "max_positions": 16},
    "longrope": {"dim": DIM, "kind": "longrope", "parameters": LONG, "max_positions": 64},
}
HEAD_KINDS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "clipped": {"clip": 0.5},
    "rms": {"norm": "rms", "gain": some(HEADS + KV_HEADS, DIM, seed=5)},
    "rms plus one": {"norm": "rms_plus_one", "gain": some(HEADS + KV_HEADS, DIM, seed=5)},
    "layer": {
        "norm": "layer",
        "gain": some(HEADS + KV_HEADS, DIM, seed=5),
        "bias": some(HEADS + KV_HEADS, DIM, seed=6),
    },
    "rms behind the rotation": {
        "norm": "rms",
        "norm_last": True,
        "gain": some(HEADS + KV_HEADS, DIM, seed=5),
    },
    "layer behind the rotation": {
        "norm": "layer",
        "norm_last": True,
        "gain": some(HEADS + KV_HEADS, DIM, seed=5),
        "bias": some(HEADS + KV_HEADS, DIM, seed=6),
    },
    "all heads at once": {"norm_whole": True, "gain": some(HEADS + KV_HEADS, DIM, seed=5)},
    "all heads at once, clipped": {
        "norm_whole": True,
        "clip": 0.8,
        "gain": some(HEADS + KV_HEADS, DIM, seed=5),
    },
    "narrow values": {"value_dim": DIM // 2 + 1, "clip": 0.6},
    "wide values": {"value_dim": 2 * DIM, "value_scale": 0.7},
    "normalised values": {"value_norm": True, "gain": some(HEADS + KV_HEADS, DIM, seed=5)},
    "keys as values": {"keys_as_values": True, "gain": some(HEADS + KV_HEADS, DIM, seed=5)},
    "normalised keys as values": {"keys_as_values": True, "value_norm": True, "value_scale": 0.7},
    "queries alone": {"kv_heads": 0, "gain": some(HEADS, DIM, seed=5)},
}


def projected(steps: HeadSteps, dtype: torch.dtype, *, kernel: bool) -> list[torch.Tensor]:
    """Return queries, and the keys and values of a cache, of tokens at any positions."""
    values = 0 if steps.keys_as_values else steps.kv_heads * (steps.value_dim or steps.head_dim)
    qkv = some(4, (steps.heads + steps.kv_heads) * steps.head_dim + values, dtype=dtype)
    positions, slots = (torch.tensor(x, device=DEVICE) for x in ([0, 3, 40, 17], [9, 2, 0, 5]))
    table = None
    if steps.rotary is not None:
        table = steps.rotary.table(positions, positions + 1, dtype)
    key, value = (
        torch.zeros(12, steps.kv_heads, dim, dtype=dtype, device=DEVICE)
        for dim in (steps.head_dim, steps.value_dim or steps.head_dim)
    )
    if kernel:
        return [write_projected(qkv, steps, table, key, value, slots), key, value]
    query, new_key, new_value = steps.split(qkv, table)
    key[slots], value[slots] = new_key, new_value
    return [query, key, value]


def compare_projected(dtype: torch.dtype, rotary: dict[str, Any] | None, **kind: Any) -> None:
    if rotary is not None:
        spec = RotarySpec(**{"max_positions": 64} | rotary)
        kind["rotary"] = Rotary(spec, torch.device(DEVICE))
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "eps": 1e-6}
    steps = HeadSteps(**sizes | kind)
    ours, theirs = (projected(steps, dtype, kernel=kernel) for kernel in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        if dtype is torch.float32:
            agree(one, other)
        else:  # torch rounds both products of a rotation, of numbers around one
            torch.testing.assert_close(one, other, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_rotations(rotary: dict[str, Any], dtype: torch.dtype) -> None:
    compare_projected(dtype, rotary)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [ROTARIES["partial"], None], ids=["rotated", "not"])
@pytest.mark.parametrize("kind", HEAD_KINDS.values(), ids=HEAD_KINDS)
def test_heads(kind: dict[str, Any], rotary: dict[str, Any] | None, dtype: torch.dtype) -> None:
    vectors = {k: x.to(dtype) for k, x in kind.items() if isinstance(x, torch.Tensor)}
    if kind.get("norm") == "rms_plus_one":
        vectors = {k: x.float() for k, x in vectors.items()}
    compare_projected(dtype, rotary, **kind | vectors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_heads_are_normalised_at_once_by_several_programs(dtype: torch.dtype) -> None:
    """One of which has heads of queries, of keys and of values; and their numbers do not fit it."""
    heads, kv_heads, dim = 20, 4, 128
    assert heads % count_heads(dim) and heads * dim > 2048
    gain = some(heads + kv_heads, dim, seed=5, dtype=dtype)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    compare_projected(dtype, {"dim": 64}, norm_whole=True, gain=gain, **sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_latents(compressed: bool, interleaved: bool, dtype: torch.dtype) -> None:
    spec = LatentSpec(rank=24, query_rank=12 * compressed, plain_dim=16, rotary_dim=8, value_dim=16)
    heads, own = 5, 12 if compressed else 5 * 24
    rms = [Norm("rms", some(n, seed=n, dtype=dtype), None, 1e-6, n) for n in (24, 12)]
    latent = LatentProjections(
        spec,
        query_norm=rms[1] if compressed else None,
        query_up=Linear(some(heads * 24, 12, seed=2, dtype=dtype)) if compressed else None,
        latent_norm=rms[0],
        key_up=some(heads, 16, 24, seed=3, dtype=dtype) / 4,
        value_up=some(heads, 24, 16, seed=4, dtype=dtype),
    )
    rotary = Rotary(RotarySpec(8, interleaved=interleaved), torch.device(DEVICE))
    positions, slots = (torch.tensor(x, device=DEVICE) for x in ([0, 3, 40], [9, 2, 0]))
    table = rotary.table(positions, positions + 1, dtype)
    projected = some(3, own + 24 + 8, seed=7, dtype=dtype)
    key = torch.zeros(12, 1, 32, dtype=dtype, device=DEVICE)
    known = write_latent_keys(projected, latent, rotary, table, key, slots)
    query, ends = absorb_queries(latent, latent.expand(known, projected))
    whole = torch.cat((query, rotary.apply(ends, *table[:2])), dim=-1)
    expected = latent.query_and_key(projected, lambda part: rotary.apply(part, *table[:2]))
    for one, other in zip((whole, key[slots]), expected, strict=True):
        if dtype is torch.float32:
            agree(one, other)
        else:
            torch.testing.assert_close(one, other, atol=0.03, rtol=0.02)
