"""The reference attention against the textbook formula, in every mix of rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.torch_backend.models_support import BLOCK, plan, sequence
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.attention import reference, reference_rows
from tgi_trio.shard.torch_backend.attention.alibi import alibi_slopes
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape

HEADS, KV_HEADS, DIM = 4, 2, 8
pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = 1  # of two, so that a mixed-up layer shows

KINDS = {
    "plain": {},
    "window": {"window": 37},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"slopes": alibi_slopes(HEADS)},
    "all": {"window": 21, "soft_cap": 3.0, "slopes": alibi_slopes(HEADS)},
}


def _layer(kind: str) -> AttentionLayer:
    return AttentionLayer(LAYER, HEADS, KV_HEADS, DIM, scale=0.3, **KINDS[kind])  # type: ignore


def _naive(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of the last Q positions of one sequence, [Q, heads, dim], in float64."""
    count, context = query.shape[0], key.shape[0]
    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * layer.scale
    if layer.soft_cap:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    keys, queries = torch.arange(context), torch.arange(context - count, context)[:, None]
    if layer.slopes is not None:
        scores = scores + layer.slopes.double()[:, None, None] * (keys - queries)
    hidden = keys > queries
    if layer.window:
        hidden |= queries - keys >= layer.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).float()


def _check(kind: str, contexts: list[int], counts: list[int], seed: int) -> None:
    """Fill a cache with each row's past, then attend to the plan."""
    layer, draw = _layer(kind), random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [-(-context // BLOCK) for context in contexts]
    blocks = list(range(1, sum(sizes) + 1))
    if draw.random() < 0.7:
        draw.shuffle(blocks)
    cache = KVCache(KVShape(2, KV_HEADS, DIM), len(blocks) + 1, torch.float32, torch.device("cpu"))
    rows: list[ShardSequence] = []
    past = []
    for i, (context, count, size) in enumerate(zip(contexts, counts, sizes, strict=True)):
        mine, blocks = blocks[:size], blocks[size:]
        row = sequence(i, [3] * context, mine, new=0)
        row.computed = context - count
        rows.append(row)
        key, value = torch.randn(2, context, KV_HEADS, DIM, generator=generator)
        past.append((key, value))
        where = torch.from_numpy(
            np.array(mine)[np.arange(row.computed) // BLOCK] * BLOCK
            + np.arange(row.computed) % BLOCK
        )
        cache.key_slots[LAYER][where] = key[: row.computed]
        cache.value_slots[LAYER][where] = value[: row.computed]
    step: StepPlan = plan(rows, counts)
    query = torch.randn(sum(counts), HEADS, DIM, generator=generator)
    new = [[x[c - n :] for x in kv] for kv, c, n in zip(past, contexts, counts, strict=True)]
    backend = ReferenceAttention()
    batch = backend.prepare(step, cache)
    key, value = (torch.cat([kv[i] for kv in new]) for i in range(2))
    got = backend.attend(layer, query, key, value, batch)
    parts = query.split(counts)
    expected = torch.cat([_naive(layer, q, *kv) for q, kv in zip(parts, past, strict=True)])
    torch.testing.assert_close(got, expected.reshape(len(query), -1), atol=2e-5, rtol=1e-4)
    assert not cache.key_slots[0].any()  # the other layer is untouched


rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 90), st.sampled_from(["decode", "all", "chunk"])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), rows=rows_of_a_step, seed=st.integers(0, 99))
def test_any_mix_of_rows(kind: str, rows: list[tuple[int, str]], seed: int) -> None:
    contexts = [context for context, _ in rows]
    sizes: dict[str, Callable[[int], int]] = {
        "decode": lambda n: 1,
        "all": lambda n: n,
        "chunk": lambda n: (n + 1) // 2,
    }
    _check(kind, contexts, [sizes[how](context) for context, how in rows], seed)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_more_queries_than_a_tile(kind: str) -> None:
    assert reference._TILE < 300
    _check(kind, [700, 600, 620], [300, 600, 1], seed=1)


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_long_contexts_are_not_padded_together(kind: str) -> None:
    assert reference_rows._LONG < 4500
    _check(kind, [4500, 4490, 3, 1200, 1100, 17], [1] * 6, seed=2)


def test_a_bucket_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows decode, the padded copy of their K and V stays within the bound."""
    monkeypatch.setattr(reference_rows, "_BUCKET_TOKENS", 256)
    _check("plain", [60, 50, 64, 55, 61, 40, 62, 63, 59], [1] * 9, seed=3)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 40])
def test_alibi_slopes_fall_as_published(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,) and bool((slopes > 0).all()) and slopes.max() <= 1.0
    if heads == 4:  # 2^-2, 2^-4, ... for a power of two
        assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    if heads == 6:  # the other two are the odd ones of eight
        assert slopes.tolist()[4:] == [0.5, 0.125]
