"""Our Triton kernel against plain torch: on a GPU, elsewhere through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.attention_cases import KINDS, attended
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.torch_backend.attention.interface import CapturableAttention
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention

need_triton()

SIZES = {
    "prefills": ([40, 1, 17], [40, 1, 17]),
    "decodes": ([40, 1, 17, 33], [1, 1, 1, 1]),
    "mixed": ([90, 40, 1, 17, 33], [70, 5, 1, 1, 6]),
}


@pytest.fixture(params=[1, 16], ids=["whole", "divided"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CapturableAttention:
    from tgi_trio.shard.torch_backend.attention import paged

    monkeypatch.setattr(paged, "_PROGRAMS", request.param)  # where tiles are fewer, in parts
    return paged.PagedAttention(torch.device(DEVICE))


def agree(backend: CapturableAttention, *sizes: list[int], **options: Any) -> None:
    ours = attended(backend, *sizes, device=DEVICE, **options)
    expected = attended(ReferenceAttention(), *sizes, **options)
    half = options.get("dtype") in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(ours, expected, atol=2e-2 if half else 1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_agrees_with_plain_torch(
    backend: CapturableAttention, sizes: tuple[list[int], list[int]], kind: dict[str, Any]
) -> None:
    agree(backend, *sizes, **kind)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 14, "kv_heads": 2, "dim": 64},  # a group that is no power of two
        {"heads": 20, "kv_heads": 1, "dim": 24},  # a head size that is none, more heads than lanes
        {"heads": 3, "kv_heads": 3, "dim": 16},  # a key of its own for every head
        {"heads": 2, "kv_heads": 1, "dim": 256},
    ],
    ids=str,
)
def test_any_shape_of_heads(backend: CapturableAttention, shape: dict[str, int]) -> None:
    agree(backend, *SIZES["mixed"], **shape)
    agree(backend, *SIZES["decodes"], **shape, window=16)


def test_half_precision(backend: CapturableAttention) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # numpy has no bfloat16
    agree(backend, *SIZES["mixed"], dtype=dtype)


def test_tiles_cover_every_pair_once_the_longest_first() -> None:
    from tgi_trio.shard.torch_backend.attention.paged import split_pairs

    rows, starts = split_pairs(np.array([5, 1, 8, 3], np.int32), 4)
    assert rows.tolist() == [0, 2, 0, 1, 2, 3]
    assert starts.tolist() == [4, 4, 0, 0, 0, 0]


def test_few_tiles_are_divided() -> None:
    from tgi_trio.shard.torch_backend.attention.paged import count_parts

    assert [count_parts(n) for n in (1, 8, 32, 128, 200, 257, 512, 9999)] == [
        *(32, 32, 16, 4, 2, 1, 1, 1)
    ]
