"""Attention of whole prompts on a GPU through flash-attn's kernel for rows of any length.

Its rule is literal: where every row of a step brings all of its keys, which then are in hand and
need no cache, the kernel attends to them, and no query sees beyond its own. All other steps go
elsewhere: the kernel's own block tables want pages of 256 tokens, ours have 16, and bringing keys
together first would move each of them three times. Half precision only, as the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    HeadPlaces,
)
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.staging import Staging

Kernel = Callable[..., torch.Tensor]  # flash_attn.flash_attn_varlen_func


@dataclass(slots=True)
class WholePrompts:
    """A plan whose rows bring all of their keys, on the device."""

    slots: torch.Tensor  # int64 [T] where new K and V go
    starts: torch.Tensor  # int32 [R + 1] of the rows' tokens
    longest: int


@dataclass(slots=True)
class FlashBatch:
    """A plan, for the kernel where its rows are whole."""

    plan: StepPlan
    cache: KVCache
    whole: WholePrompts | None
    other: Any = None  # what `otherwise` made of it, once it is asked


class FlashAttention(AttentionBackend):
    """See AttentionBackend."""

    name = "flash-attn"

    def __init__(self, kernel: Kernel, otherwise: AttentionBackend, device: torch.device) -> None:
        """`kernel` has the signature of `flash_attn.flash_attn_varlen_func`, version 2.6 on.

        `otherwise` computes the steps that read the cache.
        """
        self._kernel = kernel
        self._otherwise = otherwise
        self._staging = Staging(device)

    def prepare(self, plan: StepPlan, cache: KVCache) -> FlashBatch:
        counts = np.diff(plan.query_starts)
        if plan.visible is not None or (counts < plan.context_lengths).any():
            return FlashBatch(plan, cache, None)
        slots, starts = self._staging.upload([plan.kv_slots, plan.query_starts])
        return FlashBatch(plan, cache, WholePrompts(slots, starts, int(counts.max())))

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: FlashBatch,
    ) -> torch.Tensor:
        whole = batch.whole
        if whole is None or _is_beyond(layer):
            return self._otherwise.attend(layer, query, key, value, self._other(batch))
        batch.cache.key_slots[layer.index].index_copy_(0, whole.slots, key)
        batch.cache.value_slots[layer.index].index_copy_(0, whole.slots, value)
        out = self._kernel(
            query,
            key,
            value,
            cu_seqlens_q=whole.starts,
            cu_seqlens_k=whole.starts,
            max_seqlen_q=whole.longest,
            max_seqlen_k=whole.longest,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
            softcap=layer.soft_cap,
            alibi_slopes=layer.slopes,
        )
        return out.reshape(len(query), -1)

    def attend_projected(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        steps: HeadSteps,
        table: RotaryTable | None,
        batch: FlashBatch,
    ) -> torch.Tensor:
        if batch.whole is None or _is_beyond(layer):
            return self._otherwise.attend_projected(layer, qkv, steps, table, self._other(batch))
        query, key, value = steps.split(qkv, table)
        return self.attend(layer, query, key, value, batch)

    def head_places(self, layer: AttentionLayer, batch: FlashBatch) -> HeadPlaces | None:
        """See AttentionBackend: keys that the kernel attends to have to be in hand."""
        if batch.whole is not None and not _is_beyond(layer):
            return None
        return self._otherwise.head_places(layer, self._other(batch))

    def attend_written(
        self, layer: AttentionLayer, query: torch.Tensor, batch: FlashBatch
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._otherwise.attend_written(layer, query, self._other(batch))

    def _other(self, batch: FlashBatch) -> Any:
        if batch.other is None:
            batch.other = self._otherwise.prepare(batch.plan, batch.cache)
        return batch.other


def _is_beyond(layer: AttentionLayer) -> bool:
    """Return whether a layer has what the kernel does not know, or no keys in hand."""
    return layer.sinks is not None or layer.reads_only
