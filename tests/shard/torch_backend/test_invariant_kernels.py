"""Kernels where batch invariance is kept: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.torch_backend.attention_cases import HEADS, KINDS, KV_HEADS, attended
from tests.shard.torch_backend.interpreter import DEVICE, need_triton, sum_in_order
from tests.shard.torch_backend.models_support import BLOCK, plan, sequence
from tests.shard.torch_backend.test_coded_products import coded, some_parts
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import KINDS as CODES
from tgi_trio.shard.torch_backend.layers.norm import Norm

need_triton()

from tgi_trio.shard.torch_backend.attention.paged import paged_attention, spans  # noqa: E402  (Triton)
from tgi_trio.shard.torch_backend.layers.linears import coded_linear, plain_product  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear  # noqa: E402
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptPart  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
NOWHERE = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are so small that some are shared; the CPU passes for a device."""
    sum_in_order(monkeypatch)
    monkeypatch.setattr(plain_product, "runs_kernels", lambda _: True)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 32)
    monkeypatch.setattr(plain_product, "_FEW_ROWS", 8)
    monkeypatch.setattr(spans, "SPAN", 32)


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(72, 200), (40, 64), (200, 1)])
def test_a_plain_product(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Of any number of rows, in parts that programs share and in parts of one program."""
    weight, bias = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype, seed=1)
    x = some(70, inputs, dtype=dtype, seed=2)
    every = plain_product.multiply_plain(x, weight, bias, invariant=True)
    exact = x.double() @ weight.double().T + bias.double()
    close = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(every.double(), exact, atol=close * inputs**0.5, rtol=close)
    for first, end in ((0, 1), (69, 70), (3, 10), (5, 14), (0, 65)):
        found = plain_product.multiply_plain(x[first:end], weight, bias, invariant=True)
        assert torch.equal(found, every[first:end]), (first, end)
    apart = x.view(2, 35, inputs).transpose(0, 1)  # rows that do not follow one another
    found = plain_product.multiply_plain(apart, weight, bias, invariant=True)
    assert torch.equal(found.transpose(0, 1).flatten(0, 1), every)


def test_shared_parts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above means both ways to add up parts, and no rows at all are no launch."""
    tile = plain_product.choose_any_tile(torch.float32, "ampere")
    assert plain_product.count_input_parts(72, 200, tile) == 4
    assert plain_product.count_input_parts(40, 64, tile) == 2
    nothing = plain_product.multiply_plain(some(0, 64), some(40, 64), None, invariant=True)
    assert nothing.shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_heads(dtype: torch.dtype) -> None:
    weight, x = some(3, 24, 40, dtype=dtype), some(70, 3, 32, dtype=dtype, seed=1)
    x = x[..., :24]  # what lies behind belongs to something else
    every = plain_product.multiply_by_head(x, weight, invariant=True)
    exact = torch.einsum("thd,hdr->thr", x.double(), weight.double())
    close = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(every.double(), exact, atol=close * 5, rtol=close)
    for part in (slice(0, 1), slice(9, 40)):
        found = plain_product.multiply_by_head(x[part], weight, invariant=True)
        assert torch.equal(found, every[part])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CODES)
def test_a_product_of_codes(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """One row, two, as many as have tiles of their own elsewhere, and runs of very many."""
    monkeypatch.setattr(coded_linear, "_LEAST_STEPS", 1)
    monkeypatch.setattr(coded_linear, "_ROWS_AT_ONCE", 48)
    codes = coded(some_parts(kind, 40, 512, 32))
    linear = CodedLinear([codes], some(40, dtype=dtype), dtype, NOWHERE, invariant=True)
    x = some(140, 512, dtype=dtype, seed=1)
    every = linear(x)
    for first, end in ((0, 1), (7, 9), (30, 46), (40, 105)):
        assert torch.equal(linear(x[first:end]), every[first:end]), (first, end)


def test_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from tgi_trio.shard.torch_backend.layers import norm as norms

    monkeypatch.setattr(norms, "runs_kernels", lambda _: True)
    norm, x = Norm("rms", some(48), None, 1e-6, 48, invariant=True), some(5, 3, 48, seed=1)
    expected = Norm("rms", some(48), None, 1e-6, 48)(x)
    found = norm(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(norm(x[2:3]), found[2:3])


@pytest.mark.parametrize("size", [7, 5000])
def test_log_probabilities_of_prompts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    from tgi_trio.shard.torch_backend import prompt_logprobs

    monkeypatch.setattr(prompt_logprobs, "runs_kernels", lambda _: True)
    logits, targets = some(9, size) * 3, torch.arange(9, device=DEVICE) % size
    logits[4, :3] = float("-inf")
    every = PromptPart.launch(logits, targets, 3, torch.Tensor.cpu, invariant=True)
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(every.values.double(), expected.cpu(), atol=1e-5, rtol=1e-5)
    for part in (slice(0, 1), slice(4, 9)):
        own = logits[part], targets[part]
        few = PromptPart.launch(*own, 3, torch.Tensor.cpu, invariant=True)
        assert torch.equal(few.values, every.values[part])
        assert few.top_values is not None and every.top_values is not None
        assert torch.equal(few.top_values, every.top_values[part])


class Steps:
    """A layer's attention over one long row and another, step by step, in a cache of its own."""

    def __init__(self, length: int, *, dtype: torch.dtype, codes: str = "", **kind: Any) -> None:
        self.value = kind.get("value_dim", 0)
        dim = 24 if self.value else 8
        heads, kv_heads = HEADS, 1 if self.value else KV_HEADS
        kind = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in kind.items()}
        self.layer = AttentionLayer(0, heads, kv_heads, dim, scale=0.3, **kind)
        shape = KVShape.of([KVSize(kv_heads, dim, dim)], same=bool(self.value))
        self.queries = some(length, heads, dim, dtype=dtype)
        self.keys, self.values = some(2, length, kv_heads, dim, dtype=dtype, seed=1)
        held = 2 + 2 * -(-length // BLOCK)
        self.cache = KVCache(shape, held, EIGHT_BITS.get(codes, dtype), NOWHERE)
        self.backend = paged_attention.PagedAttention(NOWHERE, invariant=True)
        self.blocks = list(range(1, 1 + -(-length // BLOCK)))
        self.length, self.others = length, list(range(self.blocks[-1] + 1, held))

    def run(self, counts: list[int], beside: int = 0) -> torch.Tensor:
        """Return [length, ...]: what is found in steps of `counts` tokens.

        `beside`: tokens of another row in each step, before this one's.
        """
        found, done = [], 0
        for count in counts:
            row = sequence(1, [3] * (done + count), self.blocks, new=0)
            row.computed, part = done, slice(done, done + count)
            rows, sizes = [row], [count]
            tensors = [self.queries[part], self.keys[part], self.values[part]]
            if beside:
                other = sequence(0, [3] * beside, self.others, new=0)
                rows, sizes = [other, row], [beside, count]
                tensors = [torch.cat((x[:1].expand(beside, *x.shape[1:]) * 2, x)) for x in tensors]
            query, key, value = tensors
            batch: Any = self.backend.prepare(plan(rows, sizes), self.cache)
            found.append(self.backend.attend(self.layer, query, key, value, batch)[beside:])
            done += count
        return torch.cat(found)


SEVERAL: dict[str, dict[str, Any]] = {
    **KINDS,
    "wide window": {"window": 40},
    "latents": {"value_dim": 16},
    "latents, sinks": {"value_dim": 16, "sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    **{word: {"codes": word, "kv_scales": (0.5, 0.25)} for word in EIGHT_BITS},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SEVERAL.values(), ids=SEVERAL)
def test_attention(kind: dict[str, Any], dtype: torch.dtype) -> None:
    """A prompt at once, in chunks, token by token, beside others; whether spans are shared."""
    length = 70
    steps = Steps(length, dtype=dtype, **kind)
    whole = steps.run([length])
    assert torch.isfinite(whole).all() and len(whole) == length
    for counts, beside in (
        ([37, 1, 32], 0),
        ([16, 50, 1, 1, 1, 1], 5),
        ([length], 33),
    ):
        assert torch.equal(steps.run(counts, beside), whole), (counts, beside)


@pytest.mark.parametrize("programs", [1, 512], ids=["whole", "shared"])
@pytest.mark.parametrize("kind", ["plain", "sinks, window, soft cap", "alibi"])
def test_attention_agrees_with_plain_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, programs: int
) -> None:
    monkeypatch.setattr(spans, "_PROGRAMS", programs)
    sizes = [90, 40, 1, 17, 33], [70, 5, 1, 1, 6]
    ours = attended(
        paged_attention.PagedAttention(NOWHERE, invariant=True),
        *sizes,
        device=DEVICE,
        **KINDS[kind],
    )
    expected = attended(ReferenceAttention(), *sizes, **KINDS[kind])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_decodes_share_spans_and_prompts_do_not() -> None:
    """So the tests of attention compare both ways to merge spans."""
    layer = AttentionLayer(0, HEADS, KV_HEADS, 8, scale=1.0)
    decode, prompt = (some(n, HEADS, 8) for n in (1, 4096))
    assert spans.divide_into_spans(layer, decode, 1, 8, 90).programs == 3
    assert spans.divide_into_spans(layer, prompt, 1024, 8, 4096).programs == 1
