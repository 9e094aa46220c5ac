"""What flash-attn's kernel is given, shown to a stand-in with the kernel's published meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.models_support import BLOCK, plan, sequence, tables
from tgi_trio.shard.attention.alibi import alibi_slopes
from tgi_trio.shard.attention.flash import FlashAttention, choose_attention
from tgi_trio.shard.attention.interface import AttentionLayer
from tgi_trio.shard.attention.reference import ReferenceAttention
from tgi_trio.shard.kv_cache import KVCache

HEADS, KV_HEADS, DIM = 4, 2, 8


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    **sizes: Any,
) -> torch.Tensor:
    """flash_attn_varlen_func as its documentation describes it, in plain torch, causal."""
    assert sizes["causal"] and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert sizes["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    assert sizes["max_seqlen_k"] == int(cu_seqlens_k.diff().max())
    parts = []
    spans = zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True)
    for (q0, q1), (k0, k1) in spans:
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * behind.abs()
        hidden = behind < 0
        if window_size[0] >= 0:
            hidden = hidden | (behind > window_size[0])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "kind",
    [{}, {"window": 5}, {"soft_cap": 3.0}, {"slopes": alibi_slopes(HEADS)}],
    ids=["plain", "window", "soft cap", "alibi"],
)
def test_it_agrees_with_plain_torch(kind: dict[str, Any]) -> None:
    layer = AttentionLayer(1, HEADS, KV_HEADS, DIM, scale=0.3, **kind)
    contexts, counts = [40, 1, 17, 33], [40, 1, 1, 6]
    blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
    rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
    for row, context, count in zip(rows, contexts, counts, strict=True):
        row.computed = context - count
    step = plan(rows, counts)
    generator = torch.Generator().manual_seed(1)
    total = sum(counts)
    query = torch.randn(total, HEADS, DIM, generator=generator)
    key, value = torch.randn(2, total, KV_HEADS, DIM, generator=generator)
    past = torch.randn(2, 10 * BLOCK, KV_HEADS, DIM, generator=generator)
    outputs = []
    for backend in (ReferenceAttention(), FlashAttention(kernel)):
        cache = KVCache(2, 10, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        cache.key_slots[1].copy_(past[0])
        cache.value_slots[1].copy_(past[1])
        batch: Any = backend.prepare(step, cache)
        outputs.append(backend.attend(layer, query, key, value, batch))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_plain_torch_where_there_is_no_such_kernel() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_attention(torch.device("cpu"), dtype).name == "torch"
    assert choose_attention(torch.device("cuda"), torch.float32).name == "torch"
