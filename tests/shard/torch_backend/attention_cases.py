"""One layer's attention over prefills, decodes and drafts, for any two backends to agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.shard.torch_backend.models_support import BLOCK, plan, sequence, tables
from tgi_trio.shard.torch_backend.attention.alibi import alibi_slopes
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import EIGHT_BITS, KVCache, KVShape, KVSize

HEADS, KV_HEADS, DIM = 4, 2, 8
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "chunks": {"chunk": 12},
    "chunks, window": {"chunk": 12, "window": 5},
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
    value: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spans: int = 0,
    codes: str = "",
    **kind: Any,
) -> torch.Tensor:
    """Return [T, heads * value] on the CPU: the last `counts[i]` queries of `contexts[i]` tokens.

    `value`: numbers of a value, 0 for as many as a key's `dim`; `spans`: so many tokens at a time
    see one another both ways; `codes`: one of `EIGHT_BITS`, that K and V are kept in. Numbers and
    block tables are the same in every call with the same sizes.
    """
    value = value or dim
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

    query, new = some(total, heads, dim), some(2, total, kv_heads, max(dim, value))
    past = some(2, held * BLOCK, kv_heads, max(dim, value))
    same = layer.value_dim > 0
    shape = KVShape.of([KVSize(kv_heads, dim, value)] * 2, same=same)
    cache = KVCache(shape, held, EIGHT_BITS.get(codes, dtype), torch.device(device))
    every = torch.arange(len(past[0]), device=device)
    cache.write(1, every, past[0, ..., :dim], past[1 - same, ..., :value], layer.kv_scales)
    step = plan(rows, counts)
    if spans:
        ends = np.repeat(step.context_lengths - 1, counts)
        step.visible = np.minimum(step.positions // spans * spans + spans - 1, ends)
    batch: Any = backend.prepare(step, cache)
    keys, values = new[0, ..., :dim], new[1 - same, ..., :value]
    out = backend.attend(layer, query, keys, values, batch)
    return out.view(total, heads, -1)[..., : layer.value_dim or value].flatten(1).float().cpu()
