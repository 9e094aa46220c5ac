"""One layer's attention over prefills, decodes and guesses, for any two backends to agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.shard.torch_backend.models_support import BLOCK, plan, sequence, tables
from tgi_trio.shard.torch_backend.attention.alibi import alibi_slopes
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape

HEADS, KV_HEADS, DIM = 4, 2, 8
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"slopes": alibi_slopes(HEADS)},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
    "sinks, window, soft cap": {"sinks": torch.ones(HEADS), "window": 5, "soft_cap": 3.0},
}


def attended(
    backend: AttentionBackend,
    contexts: list[int],
    counts: list[int],
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spans: int = 0,
    **kind: Any,
) -> torch.Tensor:
    """Return [T, heads * dim] on the CPU: the last `counts[i]` queries of `contexts[i]` tokens.

    `spans`: so many tokens at a time see one another both ways. Numbers and block tables are the
    same in every call with the same sizes.
    """
    kind = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in kind.items()}
    layer = AttentionLayer(1, heads, kv_heads, dim, scale=0.3, **kind)
    blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
    rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
    for row, context, count in zip(rows, contexts, counts, strict=True):
        row.computed = context - count
    generator = torch.Generator().manual_seed(1)
    total, held = sum(counts), 1 + sum(map(len, blocks))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query, key, value = some(total, heads, dim), *some(2, total, kv_heads, dim)
    past = some(2, held * BLOCK, kv_heads, dim)
    same = layer.value_dim > 0
    cache = KVCache(KVShape(2, kv_heads, dim, same), held, dtype, torch.device(device))
    cache.key_slots[1].copy_(past[0])
    if not same:
        cache.value_slots[1].copy_(past[1])
    step = plan(rows, counts)
    if spans:
        ends = np.repeat(step.context_lengths - 1, counts)
        step.visible = np.minimum(step.positions // spans * spans + spans - 1, ends)
    batch: Any = backend.prepare(step, cache)
    out = backend.attend(layer, query, key, key if same else value, batch)
    return out.view(total, heads, -1)[..., : layer.value_dim or dim].flatten(1).float().cpu()
