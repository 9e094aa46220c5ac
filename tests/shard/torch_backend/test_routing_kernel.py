"""The kernel that routes tokens to experts, against the same in torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.torch_backend.layers import mlp as layers_mlp
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS
from tgi_trio.shard.torch_backend.layers.experts.routing import route
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp

need_triton()

from tgi_trio.shard.torch_backend.layers.experts import grouped_experts  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts.grouped_experts import GroupedExperts  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import PlainMatrices, Routed  # noqa: E402

HIDDEN, WIDTH = 24, 40
ROUTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"count": 8, "per_token": 2, "normalise": True},
    "olmoe": {"count": 5, "per_token": 3, "normalise": False},
    "all": {"count": 4, "per_token": 4, "normalise": True},
    "phimoe": {
        "count": 6,
        "per_token": 2,
        "normalise": False,
        "routing": "sparse-mixer",
        "jitter": 0.2,
    },
    "deepseek_v2": {
        "count": 15,
        "per_token": 4,
        "normalise": False,
        "routing": "grouped-softmax",
        "groups": 5,
        "groups_used": 2,
        "scale": 16.0,
    },
    "deepseek_v3": {
        "count": 16,
        "per_token": 4,
        "normalise": True,
        "routing": "grouped-sigmoid",
        "groups": 4,
        "groups_used": 2,
        "scale": 2.5,
    },
    "ernie4_5_moe": {"count": 6, "per_token": 3, "normalise": True, "routing": "biased-softmax"},
    "deepseek_v4": {
        "count": 6,
        "per_token": 3,
        "normalise": True,
        "routing": "sqrt-softplus",
        "scale": 1.5,
    },
    "kolibri1": {"count": 6, "per_token": 3, "normalise": False, "routing": "sigmoid"},
    "laguna": {
        "count": 16,
        "per_token": 4,
        "normalise": True,
        "routing": "grouped-sigmoid",
        "logit_cap": 1.5,
    },
    "longcat_flash": {
        "count": 7,
        "per_token": 5,
        "normalise": False,
        "routing": "biased-softmax",
        "scale": 1.5,
        "idle": 4,
    },
    "flint": {"count": 12, "per_token": 4, "normalise": True, "routing": "sigmoid", "scale": 1.5},
    "llama4": {
        "count": 6,
        "per_token": 2,
        "normalise": False,
        "routing": "sigmoid",
        "weighs_inputs": True,
    },
    "one group": {"count": 6, "per_token": 2, "normalise": True, "routing": "grouped-sigmoid"},
}


ASKED = (  # dtypes of tokens and router
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
)
BIASED = ("grouped-sigmoid", "biased-softmax", "sigmoid", "sqrt-softplus")


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def every(spec: ExpertsSpec) -> int:
    """Return the number of experts, with those that return their input."""
    return spec.count + spec.idle


def experts(spec: ExpertsSpec, bias: torch.Tensor | None, dtype: torch.dtype) -> GroupedExperts:
    count, silu = spec.count, ACTIVATIONS["silu"]
    up = PlainMatrices(some(count, WIDTH, HIDDEN, dtype=dtype) / 5, some(count, WIDTH, dtype=dtype))
    down = PlainMatrices(
        some(count, HIDDEN, WIDTH, dtype=dtype) / 6, some(count, HIDDEN, dtype=dtype)
    )
    return GroupedExperts(spec, up, down, silu, bias)


def one_by_one(made: GroupedExperts, spec: ExpertsSpec, bias: torch.Tensor | None) -> ExpertsMlp:
    """Return the same experts as the host computes them."""
    parts = [(made._up.weight[i], made._up.bias[i]) for i in range(spec.count)]  # type: ignore
    outer = [(made._down.weight[i], made._down.bias[i]) for i in range(spec.count)]  # type: ignore
    dense = [
        DenseMlp(Linear(*up), Linear(*down), ACTIVATIONS["silu"])
        for up, down in zip(parts, outer, strict=True)
    ]
    return ExpertsMlp(spec, router=Linear(torch.empty(0, 0)), experts=dense, choice_bias=bias)


@pytest.fixture(params=ROUTINGS)
def spec(request: pytest.FixtureRequest) -> ExpertsSpec:
    return ExpertsSpec(width=WIDTH, **ROUTINGS[request.param])


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_it_chooses_what_torch_chooses(spec: ExpertsSpec, tokens: int) -> None:
    """Again and again: each launch leaves the counters as it found them."""
    bias = some(every(spec), seed=3) if spec.routing in BIASED else None
    made = experts(spec, bias, torch.float32)
    for seed in range(3):
        logits = 2.0 * some(tokens, every(spec), seed=seed)
        weights, chosen = route(logits, spec, bias)
        routed = made.route(logits, torch.float32)
        assert not made._counters.any()
        assert routed.counts.tolist() == chosen.flatten().bincount(minlength=every(spec)).tolist()
        ours, _ = by_expert(routed, spec)
        theirs = torch.zeros_like(ours).scatter(1, chosen, weights)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_softplus_of_any_size_is_exact() -> None:
    spec = ExpertsSpec(4, 2, WIDTH, normalise=False, routing="sqrt-softplus")
    logits = torch.tensor([[-12.0, -60.0, -7.0, -90.0], [19.9, 20.1, 50.0, 0.0]], device=DEVICE)
    weights, chosen = route(logits, spec, None)
    ours, _ = by_expert(experts(spec, None, torch.float32).route(logits, torch.float32), spec)
    wanted = torch.zeros_like(ours).scatter(1, chosen, weights)
    torch.testing.assert_close(ours, wanted, atol=0.0, rtol=1e-5)


def test_a_table_chooses_for_the_kernel_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ExpertsSpec(6, 2, WIDTH, normalise=True, routing="sqrt-softplus", by_token=True)
    made = experts(spec, None, torch.float32)
    host = one_by_one(made, spec, None)
    host.router = Linear(some(6, HIDDEN, seed=8))
    host.table = torch.stack([torch.tensor([i % 6, (i + 2) % 6]) for i in range(9)]).to(DEVICE)
    ids = torch.tensor([0, 3, 8, 3, 5], device=DEVICE)
    x = some(5, HIDDEN, seed=4)
    wanted = host(x, ids=ids)
    host.grouped = made
    torch.testing.assert_close(host(x, ids=ids), wanted, atol=1e-5, rtol=1e-4)


def test_many_programs_share_the_lists(spec: ExpertsSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "_MOST_TOKENS", 4)
    made = experts(spec, None, torch.float32)
    logits = some(50, every(spec), seed=5)
    routed = made.route(logits, torch.float32)
    _, chosen = route(logits, spec, None)
    for expert, count in enumerate(routed.counts.tolist()):
        tokens = sorted((routed.pairs[expert, :count] // spec.per_token).tolist())
        assert tokens == (chosen == expert).any(1).nonzero().flatten().tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 37])
def test_few_tokens_are_multiplied_with_the_router_where_they_are_routed(
    spec: ExpertsSpec, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs that share experts and inputs, again and again; what was chosen is the same.

    A gate of shared experts is multiplied beside them.
    """
    for name, value in (("ROUTER_DEPTH", 16), ("_PART", 32)):
        monkeypatch.setattr(grouped_experts, name, value)
    inputs = 90  # three parts, the last of which is not whole
    bias = some(every(spec), seed=3) if spec.routing in BIASED else None
    made = experts(spec, bias, torch.float32)
    for seed, (asking, wide) in enumerate(ASKED):
        x = some(tokens, inputs, seed=seed, dtype=asking) / 4
        own = some(every(spec), seed=7, dtype=wide) if seed else None
        router = Linear(some(every(spec), inputs, seed=9, dtype=wide), own)
        shared_gate = Linear(some(1, inputs, seed=10, dtype=asking))
        routed = made.ask(x, router, torch.float32, shared_gate)
        weights, chosen = by_expert(routed, spec)
        assert routed.gate_logits is not None
        near = 1e-4 if asking is torch.float32 else 0.02
        torch.testing.assert_close(routed.gate_logits, shared_gate(x), atol=near, rtol=near)
        assert torch.equal(made.ask(x, router, torch.float32).weights, routed.weights)
        assert not made._counters.any() and not made._arrived.any()
        logits = router(x.to(wide))
        theirs, expected = by_expert(made.route(logits, torch.float32), spec)
        if wide is torch.bfloat16:  # sums of another order may be rounded to the next number
            assert (chosen == expected).float().mean() > 0.9
        else:
            assert torch.equal(chosen, expected)
            torch.testing.assert_close(weights, theirs, atol=1e-5, rtol=1e-4)


def by_expert(routed: Routed, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and whether they are chosen, [T, experts] each, of lists of pairs."""
    weights = torch.zeros(len(routed.weights), every(spec), device=DEVICE)
    chosen = torch.zeros_like(weights, dtype=torch.bool)
    for expert, count in enumerate(routed.counts.tolist()):
        pairs = routed.pairs[expert, :count].long()
        assert len(set(pairs.tolist())) == count
        weights[pairs // spec.per_token, expert] = routed.weights.flatten()[pairs]
        chosen[pairs // spec.per_token, expert] = True
    assert (chosen.sum(1) == spec.per_token).all()
    return weights, chosen


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_mixture_says_what_its_experts_say_one_by_one(
    spec: ExpertsSpec, tokens: int, dtype: torch.dtype
) -> None:
    bias = some(every(spec), seed=3) if spec.routing in BIASED else None
    made = experts(spec, bias, dtype)
    x, logits = some(tokens, HIDDEN, seed=8, dtype=dtype), some(tokens, every(spec), seed=9)
    weights, chosen = route(logits, spec, bias)
    host = one_by_one(made, spec, bias)
    expected = host._one_by_one(x.float(), weights, chosen) if dtype is torch.float32 else None
    if expected is None:
        for expert in host.experts:
            for linear in (expert.up, expert.down):
                assert linear.bias is not None
                linear.weight, linear.bias = linear.weight.float(), linear.bias.float()
        expected = host._one_by_one(x.float(), weights, chosen)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    largest = float(expected.abs().max())
    ours = made(x, made.route(logits, x.dtype)).float()
    torch.testing.assert_close(ours, expected, atol=tolerance * largest, rtol=0.0)


GATES = {
    "halves": Gate(functional.silu),
    "pairs": Gate(functional.silu, paired=True),
    "limited pairs": Gate(ACTIVATIONS["quick_gelu"], 0.7, paired=True),
    "limited halves": Gate(functional.silu, 0.7, raised=False),
    "limited halves of those": Gate(functional.silu, 0.7, raised=False),  # that are routed
}
WITHOUT_LIMIT = Gate(functional.silu, raised=False)


def mlp(width: int, gate: Gate, dtype: torch.dtype, seed: int, biases: bool) -> DenseMlp:
    def linear(outputs: int, inputs: int, more: int) -> Linear:
        bias = some(outputs, seed=seed + more + 1, dtype=dtype) if biases else None
        return Linear(some(outputs, inputs, seed=seed + more, dtype=dtype) / 5, bias)

    return DenseMlp(linear(2 * width, HIDDEN, 0), linear(HIDDEN, width, 2), gate)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 70])
@pytest.mark.parametrize(
    ("gate", "shared", "biases", "gate_logits", "inputs"),
    [
        ("halves", 2.5, False, True, False),
        ("halves", 1.5, True, False, True),
        ("pairs", 1, True, False, False),
        ("limited pairs", 0, True, False, False),
        ("limited halves", 1, False, False, False),
        ("limited halves of those", 1.5, False, False, False),
    ],
)
def test_gates_and_what_is_shared_are_parts_of_the_products(
    gate: str,
    shared: float,
    biases: bool,
    gate_logits: bool,
    inputs: bool,
    tokens: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expert of every token is cut into such as the others, whatever its width.

    Its weight is 1, and the others' multiply outputs or `inputs`, with a factor for each expert.
    """
    spec = ExpertsSpec(width=WIDTH, **ROUTINGS["mixtral"], weighs_inputs=inputs)

    def layer(dtype: torch.dtype, where: torch.dtype) -> ExpertsMlp:
        made = [mlp(WIDTH, GATES[gate], dtype, 10 * i, biases) for i in range(spec.count)]
        common = WITHOUT_LIMIT if gate.endswith("those") else GATES[gate]
        whole = mlp(int(shared * WIDTH), common, dtype, 99, biases) if shared else None
        for each in (*made, *([] if whole is None else [whole])):
            for linear in (each.up, each.down):
                linear.weight = linear.weight.to(where)
                linear.bias = None if linear.bias is None else linear.bias.to(where)
        return ExpertsMlp(
            spec,
            router=Linear(some(spec.count, HIDDEN, seed=5, dtype=dtype).to(where)),
            experts=made,
            shared=whole,
            shared_router=Linear(some(1, HIDDEN, seed=6, dtype=dtype).to(where))
            if gate_logits
            else None,
            expert_scale=1.0 + some(spec.count, seed=7) / 4,
        )

    x = some(tokens, HIDDEN, seed=8, dtype=dtype)
    expected = layer(dtype, torch.float32)(x.float())
    ours = layer(dtype, dtype)
    taken = ours.nbytes()
    monkeypatch.setattr(layers_mlp, "runs_kernels", lambda device: True)
    assert ours.group() and ours.shared is None and ours.nbytes() == taken
    found = ours(x).float()
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:  # a router's rounding may send a token elsewhere
        close = ((found - expected).abs().amax(1) / expected.abs().max()).median()
        assert close < 0.02
