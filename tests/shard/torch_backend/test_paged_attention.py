"""Our Triton kernel against plain torch: on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.attention_cases import KINDS, attended
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer, CapturableAttention
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape

need_triton()

SIZES = {
    "prefills": ([40, 1, 17], [40, 1, 17]),
    "decodes": ([40, 1, 17, 33], [1, 1, 1, 1]),
    "mixed": ([90, 40, 1, 17, 33], [70, 5, 1, 1, 6]),
}


@pytest.fixture(params=[1, 16], ids=["whole", "divided"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CapturableAttention:
    from tgi_trio.shard.torch_backend.attention.paged import (
        paged_attention,
        split_kv,
    )

    monkeypatch.setattr(split_kv, "_PROGRAMS", request.param)  # where tiles are fewer, in parts
    return paged_attention.PagedAttention(torch.device(DEVICE))


def agree(backend: CapturableAttention, *sizes: list[int], **options: Any) -> None:
    ours = attended(backend, *sizes, device=DEVICE, **options)
    expected = attended(ReferenceAttention(), *sizes, **options)
    half = options.get("dtype") in (torch.float16, torch.bfloat16)
    # Devices add up in another order, and processors in orders of their own: a sum's error grows as
    # the root of its terms.
    terms = max(1.0, options.get("dim", 64) / 64)
    atol = 2e-2 if half else 1e-5 * terms**0.5
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_agrees_with_plain_torch(backend: CapturableAttention, kind: dict[str, Any]) -> None:
    """Prefills and decodes of one step, tiles of both."""
    agree(backend, *SIZES["mixed"], **kind)


@pytest.mark.parametrize("kind", ["plain", "sinks, window, soft cap"])
@pytest.mark.parametrize("sizes", ["prefills", "decodes"])
def test_steps_of_one_sort(backend: CapturableAttention, sizes: str, kind: str) -> None:
    agree(backend, *SIZES[sizes], **KINDS[kind])


@pytest.mark.parametrize("window", [0, 5])
def test_tokens_that_see_one_another(backend: CapturableAttention, window: int) -> None:
    """Within spans as of images: shorter and longer than a tile, and cut off by their rows."""
    agree(backend, *SIZES["mixed"], spans=7, window=window)
    agree(backend, *SIZES["prefills"], spans=40, window=window)


def test_layers_in_which_they_do_not(backend: CapturableAttention) -> None:
    for each in (backend, ReferenceAttention()):
        plain = attended(each, *SIZES["mixed"], device=DEVICE)
        blind = attended(each, *SIZES["mixed"], device=DEVICE, spans=7, ahead=False)
        assert torch.equal(blind, plain)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 14, "kv_heads": 2, "dim": 64},  # a group that is no power of two
        {"heads": 20, "kv_heads": 1, "dim": 24},  # a head size that is none, more heads than lanes
        {"heads": 3, "kv_heads": 3, "dim": 16},  # a key of its own for every head
        {"heads": 2, "kv_heads": 1, "dim": 256},
        {"heads": 4, "kv_heads": 2, "dim": 288},
        {"heads": 7, "kv_heads": 1, "dim": 512},
        {"heads": 4, "kv_heads": 2, "dim": 24, "value": 16},  # values narrower than keys
        {"heads": 6, "kv_heads": 2, "dim": 192, "value": 128},
        {"heads": 2, "kv_heads": 1, "dim": 16, "value": 40},  # and wider
    ],
    ids=str,
)
def test_any_shape_of_heads(backend: CapturableAttention, shape: dict[str, int]) -> None:
    agree(backend, *SIZES["mixed"], **shape)
    agree(backend, *SIZES["decodes"], **shape, window=16)
    agree(backend, *SIZES["decodes"], **shape, chunk=24)


@pytest.mark.parametrize("codes", EIGHT_BITS)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "dim": 288},
        {"heads": 4, "kv_heads": 1, "dim": 512},
        {"heads": 4, "kv_heads": 2, "dim": 192, "value": 128},
    ],
    ids=str,
)
def test_heads_of_8_bits(backend: CapturableAttention, shape: dict[str, int], codes: str) -> None:
    kind = {"codes": codes, "kv_scales": (1 / 64, 1 / 96), "chunk": 24}
    agree(backend, *SIZES["mixed"], **shape, **kind)


@pytest.mark.parametrize("ahead", [True, False])
def test_chunks_of_tokens_that_see_one_another(backend: CapturableAttention, ahead: bool) -> None:
    agree(backend, *SIZES["mixed"], spans=7, chunk=24, ahead=ahead)
    agree(backend, *SIZES["prefills"], spans=40, chunk=12, ahead=ahead)


def test_tiles_of_many_chunks(backend: CapturableAttention) -> None:
    """Shorter than a tile of queries, than a step of keys, and longer than either."""
    for chunk in (1, 7, 32, 64, 128):
        agree(backend, [200, 130], [150, 130], chunk=chunk, heads=2, kv_heads=2, dim=64)
        agree(backend, [200, 130, 65], [1, 1, 1], chunk=chunk)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 3, "dim": 16 + 8, "value_dim": 16},
        {"heads": 20, "dim": 512 + 64, "value_dim": 512},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents(backend: CapturableAttention, shape: dict[str, int], dtype: torch.dtype) -> None:
    """Keys that are their own values, for all heads."""
    agree(backend, [40, 1, 17, 33], [3, 1, 1, 6], kv_heads=1, dtype=dtype, **shape)
    agree(backend, [40, 1, 17], [1, 1, 1], kv_heads=1, dtype=dtype, **shape)


def test_half_precision(backend: CapturableAttention) -> None:
    agree(backend, *SIZES["mixed"], dtype=torch.bfloat16)
    agree(backend, *SIZES["mixed"], dtype=torch.float16)


def test_a_sink_is_one_more_key_without_a_value() -> None:
    """Plain torch's own: a key whose score is the sink, and whose value is zero."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 5, 16)
    layer = AttentionLayer(0, 1, 1, 16, scale=0.25, sinks=torch.tensor([0.7]))
    cache = KVCache(KVShape(1, 1, 16), 2, torch.float32, torch.device("cpu"))
    batch = ReferenceAttention().prepare(plan([sequence(0, [1] * 5, [1], new=0)], [5]), cache)
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    ours = ReferenceAttention().attend(layer, next(flat), next(flat), next(flat), batch)
    scores = (query[0, 0] @ key[0, 0].T * 0.25).masked_fill(
        torch.ones(5, 5).triu(1) > 0, -torch.inf
    )
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + torch.tensor(0.7).exp())
    torch.testing.assert_close(ours, weights @ value[0, 0])


def test_tiles_cover_every_pair_once_the_longest_first() -> None:
    from tgi_trio.shard.torch_backend.attention.paged.tiling import split_pairs

    rows, starts = split_pairs(np.array([5, 1, 8, 3], np.int32), 4)
    assert rows.tolist() == [0, 2, 0, 1, 2, 3]
    assert starts.tolist() == [4, 4, 0, 0, 0, 0]


def test_few_tiles_are_divided() -> None:
    from tgi_trio.shard.torch_backend.attention.paged.split_kv import count_parts

    assert [count_parts(n) for n in (1, 8, 32, 128, 200, 257, 512, 9999)] == [
        *(32, 32, 16, 4, 2, 1, 1, 1)
    ]
