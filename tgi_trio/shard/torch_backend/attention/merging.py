"""Who merges the parts of a decode's context: a kernel of its own, or the program that comes last.

The latter saves a launch a layer, and reads what others have just written by its own. Which takes
less is measured at the warm-up, on the device that serves, where parts are the most: of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np
import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged import PagedAttention, PagedBatch
from tgi_trio.shard.torch_backend.attention.tiling import HostTiling
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.few_rows import agree
from tgi_trio.shard.torch_backend.staging import Staging

_CONTEXT: Final = 1024
_TIMES: Final = 16  # one behind the other, as layers are
_WORTH: Final = 0.98  # of what a kernel of its own takes, from which on it is left out

Seconds = Callable[[Callable[[], torch.Tensor]], float]  # that some work takes on the device


def choose_merging(
    attention: PagedAttention,
    layers: Iterable[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    seconds: Seconds,
) -> None:
    """Have parts merged the way that takes less, and finds what the other one does.

    Layers of one kind are measured together; nothing is where all have keys that are their values,
    whose parts no program merges.
    """
    attention.merges = False
    kinds = {
        (layer.heads, layer.kv_heads, layer.head_dim): layer
        for layer in layers
        if not layer.value_dim
    }
    if not kinds:
        return
    work = [_attend_one(attention, *kind, dtype, device) for kind in kinds]

    def run() -> torch.Tensor:
        return [each() for _ in range(_TIMES) for each in work][-1]

    apart, wanted = seconds(run), [each() for each in work]
    attention.merges = True
    if seconds(run) >= _WORTH * apart or not all(
        agree(each(), expected, "parts of decodes are merged by a kernel of their own")
        for each, expected in zip(work, wanted, strict=True)
    ):
        attention.merges = False


def _attend_one(
    attention: PagedAttention,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], torch.Tensor]:
    """Return what attends to one row's context of made-up keys and values."""
    blocks = _CONTEXT // BLOCK_SIZE
    cache = KVCache(KVShape(1, kv_heads, head_dim), blocks, dtype, device)
    for own in (cache.key, cache.value):
        own.copy_(torch.arange(own.numel(), device=device, dtype=torch.float32).sin())
    batch = PagedBatch(
        cache=cache,
        slots=torch.zeros(1, dtype=torch.int64, device=device),
        tables=torch.arange(blocks, dtype=torch.int32, device=device),
        width=torch.full((1,), blocks, dtype=torch.int32, device=device),
        contexts=torch.full((1,), _CONTEXT, dtype=torch.int32, device=device),
        query_starts=torch.arange(2, dtype=torch.int32, device=device),
        tiling=HostTiling(np.ones(1, np.int32), Staging(device)),
        decodes=True,
        lasts=None,
    )
    layer = AttentionLayer(0, heads, kv_heads, head_dim, scale=head_dim**-0.5)
    count = torch.arange(heads * head_dim, device=device, dtype=torch.float32)
    query = count.cos().to(dtype).view(1, heads, head_dim)
    return partial(attention.attend_written, layer, query, batch)
