"""Mixtures of experts in the kernels: the same tokens whoever else is in the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, HYBRIDS, MIXTURES, VARIANT, cpu_runner
from tests.shard.cpu_backend.test_at_any_load import DOTS
from tests.shard.cpu_backend.test_digits import AMX
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    drafting_plan,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding, round_matrix
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.machine_code.entry import MIX_EXPERTS
from tgi_trio.shard.cpu_backend.self_tests import mixtures as mixture_self_test
from tgi_trio.shard.cpu_backend.self_tests import step as self_test
from tgi_trio.shard.cpu_backend.self_tests.step import RandomWeights
from tgi_trio.shard.cpu_backend.tables import (
    MIXTURE,
    OPERATION,
    ROUTINGS,
    STEP,
    Buffer,
    Code,
)
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import narrowed
from tgi_trio.shard.cpu_backend.weight_layout import Storage
from tgi_trio.shard.torch_backend.layers.experts.routing import route

PROMPTS = prompts(16)
FAMILY = "qwen2_moe"  # which has dense layers, a shared expert and a router of that
TOLERANCE = 3e-4
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint(FAMILY, **MIXTURES[FAMILY])


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    return Golden(folder)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[tuple[Any, ...]]:
    with cpu_runner(folder, cores=(0, 1)) as pair:
        yield pair


def test_all_at_once_and_alone_on_two_threads(runner: tuple[Any, ...], golden: Golden) -> None:
    batch = sequences(PROMPTS)
    run(runner[0], batch)
    for row in batch:
        assert_greedy(golden, runner[1], row, TOLERANCE)
    for row in sequences(PROMPTS)[3:6]:
        runner[1].by_place.clear()
        run(runner[0], [row])
        assert_greedy(golden, runner[1], row, TOLERANCE)
    runner[1].by_place.clear()


def test_drafts_are_scored_as_they_would_be_chosen(runner: tuple[Any, ...], golden: Golden) -> None:
    (row,) = sequences(PROMPTS[4:5])
    tokens, logits = golden.greedy(PROMPTS[4], 8)
    row.token_ids[row.length] = tokens[0]
    row.length += 1
    run_prompt = dataclasses.replace(row, length=row.length - 1, remaining=1)
    run(runner[0], [run_prompt])
    row.computed = row.length - 1
    runner[1].by_place.clear()
    runner[0].step(drafting_plan([row], [tokens[1:6]]))
    found = runner[1].logits(row.id)
    torch.testing.assert_close(found[-1], logits[6], atol=TOLERANCE, rtol=0.0)
    runner[1].by_place.clear()


@pytest.mark.parametrize("word", [None, "fp8"])
def test_experts_without_gates_read_compressed_tokens(
    checkpoint: Checkpoint, word: str | None
) -> None:
    """The shared expert reads whole ones; both add to the same residual stream."""
    folder = checkpoint("nemotron_h", **HYBRIDS["nemotron_h"], moe_latent_size=32)
    golden, batch = Golden(folder), sequences(PROMPTS[:6], 3, new=8)
    if word is not None:
        round_weights(golden, ENCODINGS[word])
    with cpu_runner(folder, quantize=word, cores=(0, 1)) as (runner, recorder):
        run(runner, batch, chunk=7, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 2e-3)
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


@pytest.mark.parametrize(
    ("family", "word", "tolerance"),
    [
        (FAMILY, "eetq", 2e-3),  # whole numbers with a scale per output
        # activations become whole numbers of 16 bits, with a scale for each row of an expert
        pytest.param(FAMILY, "eetq by rows", 1e-2, marks=AMX),
        pytest.param("mixtral", "eetq by rows", 1e-2, marks=AMX),
        (FAMILY, "fp8", 2e-3),
        ("mixtral", "q4_0", 1e-2),  # activations become whole numbers, too, of 16 bits
    ],
)
def test_quantised_experts_are_their_dequantised_weights(
    checkpoint: Checkpoint, family: str, word: str, tolerance: float
) -> None:
    folder = checkpoint(family, **MIXTURES[family])
    golden = Golden(folder)
    int8, by_rows = word == "eetq", word.endswith(" by rows")
    word = word.removesuffix(" by rows")
    round_weights(golden, ENCODINGS[word])
    kept: dict[str, Any] = {"int8": True} if int8 else {"quantize": word, "int8_by_rows": by_rows}
    with cpu_runner(folder, **kept) as (runner, recorder):
        program = runner._forward.program
        assert int8 or program.is_all_as_stored
        of_experts = program.operations[program.operations["code"] == Code.EXPERTS]
        assert ((of_experts["facts_bytes"] > 0) == by_rows).all()  # each row has a scale
        batch = sequences(PROMPTS[:8], 3)
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, tolerance)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize(
    ("family", "word"),
    [
        (FAMILY, "eetq"),
        (FAMILY, "fp8"),
        (FAMILY, "q8_0"),
        ("laguna", "eetq"),  # whose router's logits are capped
        ("deepseek_v2", "fp8"),  # what expands latents is not rounded either
    ],
)
def test_routers_are_not_rounded(
    checkpoint: Checkpoint, family: str, word: str, backend: str
) -> None:
    """Both backends are as near to float64 of the stored weights as float32 lets them be."""
    cap = {"moe_router_logit_softcapping": 0.05} if family == "laguna" else {}
    folder, batch = checkpoint(family, **FITTING[family], **cap), sequences(PROMPTS[:6], 3, new=4)
    golden, kept = Golden(folder), ENCODINGS[word]
    latents = {
        name: parameter.data.clone()
        for name, parameter in golden.model.named_parameters()
        if "kv_b_proj" in name
    }
    round_weights(golden, kept)
    golden.model.load_state_dict(latents, strict=False)
    golden.model.double().set_experts_implementation("eager")
    if backend == "torch":
        runner, recorder = load(folder, dtype="float32", quantize=word)
        run(runner, batch, chunk=20, joins=3, seed=1)
    else:
        int8 = word == "eetq"
        with cpu_runner(folder, int8=int8, quantize=None if int8 else word) as (kernels, recorder):
            run(kernels, batch, chunk=20, joins=3, seed=1)
    texts = [(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in batch]
    exact = torch.cat([golden.logits(*text) for text in texts])
    found = torch.cat([recorder.logits(row.id) for row in batch])
    # With scales of 32 weights the kernels round activations to 16 bits.
    far = 5e-3 if (backend, word) == ("kernels", "q8_0") else 1e-4
    assert float((found - exact).abs().max()) < far


def round_weights(golden: Golden, encoding: Encoding) -> None:
    """Give all linear layers the numbers that their rounded weights mean, and so the head.

    Routers keep theirs, those of shared experts among them.
    """
    for name, parameter in golden.model.named_parameters():
        other = any(part in name for part in ("norm", "embed", "lm_head", "conv1d"))
        other |= name.endswith(("gate.weight", "router.weight", "router.linear.weight"))
        if not other and parameter.ndim > 1:
            parameter.data = rounded_weights(parameter, encoding)
    head = golden.model.lm_head
    head.weight = torch.nn.Parameter(rounded_weights(head.weight, encoding))  # may be the embedding


def rounded_weights(weights: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    rows = PlainMatrix(weights.detach().reshape(-1, weights.shape[-1]).numpy())
    return torch.from_numpy(round_matrix(rows, encoding).dequantised()).reshape(weights.shape)


def rounded_activations(inputs: torch.Tensor, bits: int) -> torch.Tensor:
    """Return activations as whole numbers of so many bits mean them; 32 share a scale."""
    blocks = inputs.reshape(-1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((blocks / scales.clamp_min(1e-30)).round() * scales).reshape(inputs.shape)


@pytest.mark.parametrize("bits", [8, 16])
def test_quantised_experts_lose_what_rounding_activations_does(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """Logits are as far off as those of float64 with rounded activations."""
    folder = checkpoint(FAMILY, **MIXTURES[FAMILY])
    golden = Golden(folder)
    round_weights(golden, ENCODINGS["q4_0"])
    golden.model.double().set_experts_implementation("eager")
    with cpu_runner(folder, quantize="q4_0", active_bits=bits) as (runner, recorder):
        assert runner._forward.program.is_all_as_stored
        batch = sequences(PROMPTS[:8], 3)
        run(runner, batch, chunk=20, joins=3, seed=1)
    found = torch.cat([recorder.logits(row.id) for row in batch])
    texts = [(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in batch]
    exact = torch.cat([golden.logits(*text) for text in texts])
    multiply = torch.nn.functional.linear

    def multiply_rounded(
        inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(rounded_activations(inputs, bits), weights, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", multiply_rounded)
    rounded = torch.cat([golden.logits(*text) for text in texts])
    ours, least = (found - exact).abs(), (rounded - exact).abs()
    assert float(ours.mean()) < 1.1 * float(least.mean())
    assert float(ours.max()) < 2 * float(least.max())


def test_bfloat16_is_near(checkpoint: Checkpoint) -> None:
    folder = checkpoint(FAMILY, **MIXTURES[FAMILY], dtype="bfloat16")
    exact = Golden(folder)
    with cpu_runner(folder, "bfloat16") as (runner, recorder):
        batch = sequences(PROMPTS[:6], 4)
        run(runner, batch, chunk=16, joins=4)
    theirs = torch.cat(
        [exact.logits(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in batch]
    )
    ours = torch.cat([recorder.logits(row.id) for row in batch])
    far = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert float(far.median()) < 0.015
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05  # some tokens choose another expert


ROUTED = [
    ExpertsSpec(count=19, per_token=5, width=32, normalise=False),
    ExpertsSpec(
        count=16, per_token=2, width=32, normalise=False, routing="sparse-mixer", jitter=0.1,
    ),
    ExpertsSpec(
        count=32, per_token=4, width=32, normalise=False, routing="grouped-softmax", groups=8,
        groups_used=3, scale=2.5,
    ),
    ExpertsSpec(
        count=40, per_token=6, width=32, normalise=True, routing="grouped-sigmoid", groups=4,
        groups_used=2, scale=1.5,
    ),
    ExpertsSpec(count=7, per_token=7, width=32, normalise=True, routing="grouped-sigmoid"),
    ExpertsSpec(count=21, per_token=2, width=32, normalise=False, routing="sigmoid"),
    ExpertsSpec(count=22, per_token=3, width=32, normalise=True, routing="sigmoid", scale=0.5),
]  # fmt: skip


@pytest.mark.parametrize("spec", ROUTED, ids=lambda spec: f"{spec.routing} {spec.count}")
def test_routing_is_that_of_torch(spec: ExpertsSpec) -> None:
    draw = np.random.default_rng(3)
    tokens, width = 33, -(-spec.count // 32) * 32
    logits = np.zeros((tokens, width), np.float32)
    logits[:, : spec.count] = draw.standard_normal((tokens, spec.count), np.float32) * 2
    bias = None
    facts = np.zeros((1,), MIXTURE)
    if spec.normalise:  # of these, the sigmoids with a bias for the choice
        bias = np.zeros(48, np.float32)
        bias[: spec.count] = draw.standard_normal(spec.count, np.float32) / 2
        facts["choice_bias"] = address(bias)
    for name in ("count", "per_token", "normalise", "groups", "groups_used", "scale", "jitter"):
        facts[name] = getattr(spec, name)
    facts["routing"] = ROUTINGS[spec.routing]
    scales = draw.random(spec.count, np.float32) + 0.5
    facts["expert_scale"] = address(scales)
    chosen = np.zeros((tokens, spec.per_token), np.int32)
    parts = np.zeros((tokens, spec.per_token), np.float32)
    step, op = np.zeros((1,), STEP), np.zeros((1,), OPERATION)
    step["threads"], step["tokens"] = 1, tokens
    for buffer, array in (
        (Buffer.ROUTED, logits),
        (Buffer.CHOSEN, chosen),
        (Buffer.PARTS, parts),
    ):
        step["buffers"][0, buffer] = address(array)
    op["code"], op["facts"], op["width"] = Code.ROUTE, address(facts), width
    scratch = allocate_zeroed((1 << 14,))
    MIX_EXPERTS.open(narrowed(VARIANT))(0, address(step), address(op), 0, address(scratch))
    given = None if bias is None else torch.from_numpy(bias[: spec.count])
    weights, experts = route(torch.from_numpy(logits[:, : spec.count].copy()), spec, given)
    np.testing.assert_array_equal(chosen, experts.numpy())
    np.testing.assert_allclose(parts, weights.numpy() * scales[experts], rtol=2e-5, atol=1e-7)


def test_kernels_of_mixtures_that_are_wrong_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified.open_kernel_group(kernel_groups.MIXTURES, VARIANT)
    right = mixture_self_test._mix
    monkeypatch.setattr(mixture_self_test, "_mix", lambda *given: 1.1 * right(*given))
    with pytest.raises(UnsupportedError, match="self-test of the kernels of mixtures failed"):
        verified.open_kernel_group(kernel_groups.MIXTURES, VARIANT)


class Rounded(RandomWeights):
    """The weights of a self-test, but for embeddings that are off by what bfloat16 rounds away."""

    def __init__(self, seed: int) -> None:
        super().__init__(int8=False)
        self._draw = np.random.default_rng(seed)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        values = super().tensor(name, shape)
        off = self._draw.uniform(-(2**-8), 2**-8, shape) if "embed" in name else np.zeros(1)
        return values * (1.0 + off.astype(np.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("value_vectors", [2, 4])
def test_rounding_decides_nothing_in_the_self_test(
    heads: int, value_vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts may be as good for a token, of which rounded numbers choose another."""
    variant = dataclasses.replace(VARIANT, heads=heads, value_vectors=value_vectors)
    spec = mixture_self_test._with_experts(self_test._tiny(variant))

    def logits(weights: RandomWeights) -> Any:
        return self_test.expected_logits(spec, weights, None, mixture_self_test._mix)

    exact = logits(RandomWeights(int8=False))
    compared = np.isfinite(exact).all(axis=1)
    assert compared.sum() > len(exact) / 2
    monkeypatch.setattr(mixture_self_test, "_NEAR", 0.0)  # as the kernels, which choose for all
    for seed in range(8):
        apart = (logits(Rounded(seed)) - exact)[compared]
        assert np.linalg.norm(apart) < 0.01 * np.linalg.norm(exact[compared])


@DOTS
def test_three_heads_with_dot_products_pass_their_self_test() -> None:
    """Of 24 tokens one had two experts that were as good."""
    numbers = Storage("bfloat16", dot=True)
    variant = dataclasses.replace(VARIANT, heads=3, value_vectors=4, tokens=4)
    variant = dataclasses.replace(variant, weights=numbers, kv=numbers, cache=numbers)
    assert verified.open_kernel_group(kernel_groups.MIXTURES, variant)
