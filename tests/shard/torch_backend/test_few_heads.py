"""A lone row's heads, turned and written as they come out of a product: as by launches apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import NormKind, RotarySpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.flash import FlashAttention
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    HeadPlaces,
)
from tgi_trio.shard.torch_backend.attention.paged import few_heads
from tgi_trio.shard.torch_backend.attention.paged.few_heads import (
    HeadProjection,
    choose_for_heads,
    choose_pairs,
)
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.layers import residual
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.linears import few_rows
from tgi_trio.shard.torch_backend.layers.linears.few_rows import project
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan

need_triton()

from tgi_trio.shard.torch_backend.attention.paged.kv_writing import write_projected  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
RANDOM = torch.Generator().manual_seed(0)
SLOTS = 4


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=RANDOM).to(DEVICE, dtype)


def heads_of(
    heads: int,
    kv_heads: int,
    dim: int,
    inputs: int,
    rotary: dict[str, Any] | None = None,
    *,
    bias: bool = False,
    kind: NormKind = "rms",
    dtype: torch.dtype = BF16,
    **more: Any,
) -> HeadProjection:
    outputs = (heads + 2 * kv_heads) * dim
    weight = (numbers(outputs, inputs, dtype=torch.float32) / inputs**0.5).to(dtype)
    own = Linear(weight, numbers(outputs, dtype=dtype) if bias else None)
    gain = numbers(inputs, dtype=dtype) * 0.1 + 1
    norm = Norm(kind, gain, numbers(inputs, dtype=dtype) if kind == "layer" else None, 1e-5, inputs)
    turning = None
    if rotary is not None:
        turning = Rotary(RotarySpec(**{"max_positions": 64} | rotary), torch.device(DEVICE))
    return HeadProjection(own, norm, HeadSteps(heads, kv_heads, dim, rotary=turning, **more))


def table_of(own: HeadProjection, positions: list[int], dtype: torch.dtype) -> RotaryTable | None:
    at = torch.tensor(positions, device=DEVICE)
    return None if own.steps.rotary is None else own.steps.rotary.table(at, at + 1, dtype)


def places_of(own: HeadProjection, slots: list[int], dtype: torch.dtype) -> HeadPlaces:
    shape = (SLOTS, own.steps.kv_heads, own.steps.head_dim)
    memory = torch.zeros(2, *shape, dtype=dtype, device=DEVICE)
    return HeadPlaces(memory[0], memory[1], torch.tensor(slots, device=DEVICE))


@pytest.mark.parametrize(
    ("shape", "rotary", "more"),
    [
        ((3, 1, 64, 96), {"dim": 64}, {}),
        ((2, 2, 80, 96), {"dim": 80}, {"bias": True, "kind": "layer"}),
        ((4, 1, 128, 80), {"dim": 32}, {"dtype": torch.float16}),
        ((2, 1, 128, 64), {"dim": 64, "interleaved": True}, {"bias": True}),
        ((2, 1, 256, 64), {"dim": 256, "interleaved": True}, {"kind": "rms_plus_one"}),
        ((1, 1, 16, 5000), {"dim": 16}, {}),
        ((2, 1, 64, 96), None, {}),
    ],
    ids=str,
)
def test_one_launch_finds_what_three_do(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    rotary: dict[str, Any] | None,
    more: dict[str, Any],
) -> None:
    """To the bit: the product with its norm, the rotation, the writing."""
    monkeypatch.setattr(residual, "runs_kernels", lambda device: True)
    dtype, inputs, rows = more.get("dtype", BF16), shape[-1], 2 if shape[0] == 3 else 1
    own = heads_of(*shape, rotary, **more)
    x, first = numbers(rows, inputs, dtype=dtype), numbers(rows, inputs, dtype=dtype)
    table = table_of(own, [40, 3][:rows], dtype)
    for addends in (Addends(first), Addends(first, scale=0.3), None):
        ours, theirs = (places_of(own, [2, 0][:rows], dtype) for _ in range(2))
        summed, query = own.project(x, addends, table, ours)
        own.linear.fused = frozenset({rows})
        own.linear.few_rows = {rows: few_rows.multiply_by_kernel}  # in a first layer
        wanted_sum, qkv = project(own.linear, x, addends, own.norm)
        wanted = write_projected(qkv, own.steps, table, *theirs)
        assert torch.equal(summed, wanted_sum)
        assert query.shape == (rows, *shape[:1], shape[2]) and torch.equal(query, wanted)
        assert torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value)
        assert ours.key[[2, 0][:rows]].abs().amax(-1).min() > 0 and not ours.key[1].any()


@pytest.mark.parametrize("glm", [True, False], ids=["neighbours, half of a head", "halves"])
def test_they_turn_as_transformers_turns_them(glm: bool) -> None:
    heads, kv_heads, dim, inputs = 4, 2, 64, 96
    rotary = {"dim": dim // 2 if glm else dim, "interleaved": glm}
    own = heads_of(heads, kv_heads, dim, inputs, rotary, dtype=torch.float32)
    x, first = (numbers(1, inputs, dtype=torch.float32) for _ in range(2))
    found = places_of(own, [1], torch.float32)
    table = table_of(own, [37], torch.float32)
    _, query = own.project(x, Addends(first), table, found)
    config = SimpleNamespace(
        **{"hidden_size": heads * dim, "num_attention_heads": heads, "head_dim": dim},
        max_position_embeddings=64,
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 10000.0},
            "partial_rotary_factor": 0.5 if glm else 1.0,
        },
    )
    theirs: Any = modeling_glm if glm else modeling_llama
    embedding = (theirs.GlmRotaryEmbedding if glm else theirs.LlamaRotaryEmbedding)(config)
    cos, sin = embedding(torch.zeros(1), torch.tensor([[37]]))
    norm = modeling_llama.LlamaRMSNorm(inputs, eps=1e-5)
    assert own.norm is not None and own.norm.weight is not None
    norm.weight.data = own.norm.weight
    qkv = torch.nn.functional.linear(norm(x + first), own.linear.weight)
    q, k, v = qkv.view(1, 1, -1, dim).split((heads, kv_heads, kv_heads), 2)
    q, k = theirs.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for mine, wanted in ((query, q[0]), (found.key[1:2], k[0]), (found.value[1:2], v[0])):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_a_program_has_whole_pairs_of_one_head() -> None:
    for inputs in (96, 512, 2048, 4096, 8192, 14336):
        for dim in (64, 80, 96, 128, 192, 256):
            pairs = choose_pairs(inputs, dim)
            assert dim // 2 % pairs == 0 and pairs & (pairs - 1) == 0
    assert [choose_pairs(inputs, 64) for inputs in (1024, 2048, 4096, 14336)] == [4, 2, 2, 1]


class Steps:
    """A step of the given layers, and what it takes where all of them are turned."""

    def __init__(self, layers: list[HeadProjection], turned: float) -> None:
        self.layers, self.took = layers, turned
        self.seen: list[tuple[int, bool]] = []  # rows, and whether all of them were

    def idle(self, rows: int) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            self.seen.append((rows, all(own.linear.turned == {1} for own in self.layers)))
            return torch.zeros(1)

        return step

    def seconds(self, step: Callable[[], torch.Tensor]) -> float:
        step()
        return self.took if self.seen[-1][1] else 1.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 1)


def choose(layers: list[HeadProjection], steps: Steps) -> None:
    like = Addends(layers[0].linear.weight)
    own = [(own, like if i else None) for i, own in enumerate(layers)]
    choose_for_heads(own, steps.idle, steps.seconds)


def test_a_lone_row_has_it_where_its_step_takes_less(small: None) -> None:
    layers = [heads_of(2, 1, 16, 32, {"dim": 16}), heads_of(2, 1, 16, 32)]
    for took, chosen in ((0.5, True), (0.995, False), (1.0, False), (2.0, False)):
        steps = Steps(layers, took)
        choose(layers, steps)
        assert steps.seen == [(1, False), (1, True)]
        assert all(own.turns(1, None) == chosen for own in layers)
    choose(layers, Steps(layers, 0.5))
    own, x = layers[1], numbers(1, 32)
    assert own.turns(1, Addends(x)) and not own.turns(2, Addends(x))
    assert not own.turns(1, Addends(ExpertParts(x, x, None, 0)))  # whose sum comes first
    assert not own.turns(1, Addends(x, factor=x[0, :1]))
    choose(layers, Steps(layers, 1.0))  # another warm-up
    assert not own.turns(1, Addends(x))


def test_heads_that_find_other_numbers_are_not_taken(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [heads_of(2, 1, 16, 32, {"dim": 16}) for _ in range(2)]
    right = HeadProjection.project

    def wrong(own: HeadProjection, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = right(own, *given)
        if own is layers[1]:
            given[-1].key.copy_(given[-1].key.roll(1, -1))
        return found

    monkeypatch.setattr(HeadProjection, "project", wrong)
    choose(layers, Steps(layers, 0.5))
    assert not any(own.linear.turned for own in layers)
    assert few_heads._LEFT in capsys.readouterr().err


def test_other_layers_keep_launches_apart(small: None) -> None:
    turning = {"dim": 16}
    others = [
        heads_of(2, 1, 16, 32, turning, gain=numbers(3, 16)),
        heads_of(2, 1, 16, 32, turning, clip=1.0),
        heads_of(2, 1, 16, 32, turning, keys_as_values=True),
        heads_of(2, 0, 16, 32, turning),
        heads_of(2, 1, 16, 32, turning, dtype=torch.float32),
        heads_of(2, 1, 15, 32),
        heads_of(2, 1, 16, 32, turning)._replace(linear=Linear(numbers(96, 32))),  # and a gate
    ]
    steps = Steps(others, 0.5)
    choose(others, steps)
    assert not steps.seen and not any(own.linear.turned for own in others)


def test_keys_and_values_have_places_where_they_stay_numbers_and_are_read_from_the_cache() -> None:
    device, layer = torch.device(DEVICE), AttentionLayer(0, 2, 1, 16, 0.25)
    own = PagedAttention(device)
    flash = FlashAttention(lambda *_, **__: torch.empty(0), own, device)
    first = idle_plan(1, 1)  # brings its only key
    later = replace(first, context_lengths=np.array([5], np.int32))
    caches = [KVCache(KVShape(1, 1, 16), 2, dtype, device) for dtype in (BF16, E4M3)]
    caches[0].key.normal_()
    caches[0].value.normal_()
    query, attended = numbers(1, 2, 16), list[torch.Tensor]()
    cases: list[tuple[AttentionBackend, StepPlan, bool]] = [
        *((own, first, True), (own, later, True)),
        *((flash, first, False), (flash, later, True)),
    ]
    for attention, plan, there in cases:
        plain, coded = (attention.prepare(plan, cache) for cache in caches)
        assert attention.head_places(layer, coded) is None
        places = attention.head_places(layer, plain)
        assert (places is not None) == there
        if places is not None:
            assert places.key.data_ptr() == caches[0].key_slots[0].data_ptr()
            assert places.value.data_ptr() == caches[0].value_slots[0].data_ptr()
            assert places.slots.tolist() == plan.kv_slots.tolist()
            attended.append(attention.attend_written(layer, query, plain))
    assert torch.equal(attended[1], attended[2]) and not torch.equal(attended[0], attended[1])
    with pytest.raises(RuntimeError, match="torch has no places"):
        ReferenceAttention().attend_written(layer, query, None)
