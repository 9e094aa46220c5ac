"""Attention of whole prompts on a GPU, by flash-attn's kernel for rows of different lengths.

It is used in steps in which every row has all of its keys among the step's new ones, so that the
cache need not be read, and no query sees beyond its own position. All other steps use another
backend, as do layers whose heads, or what these see, are none of the kernel's: its block tables
need pages of 256 tokens and ours have 16, and gathering keys first would move each of them three
times. Half precision only, like the kernel.
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
from tgi_trio.shard.torch_backend.attention.paged.tiles import MOST_FLASH
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable
from tgi_trio.shard.torch_backend.layers.opening import open_values
from tgi_trio.shard.torch_backend.staging import Staging

Kernel = Callable[..., torch.Tensor]  # flash_attn.flash_attn_varlen_func


@dataclass(slots=True)
class WholePrompts:
    """A plan on the device, whose rows have all of their keys among the new ones."""

    slots: torch.Tensor  # int64 [T]: where new K and V are written
    starts: torch.Tensor  # int32 [R + 1]: the rows' first tokens
    longest: int


@dataclass(slots=True)
class FlashBatch:
    """A plan, prepared for either backend."""

    plan: StepPlan
    cache: KVCache
    whole: WholePrompts | None  # None: the kernel cannot compute it
    other: Any = None  # prepared by `otherwise` when a layer first needs it


class FlashAttention(AttentionBackend):
    """See AttentionBackend."""

    name = "flash-attn"

    def __init__(self, kernel: Kernel, otherwise: AttentionBackend, device: torch.device) -> None:
        """`kernel`: has the signature of `flash_attn.flash_attn_varlen_func`, from 2.6 on.

        `otherwise`: computes the steps that read the cache.
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
        if whole is None or _is_beyond(layer, batch.cache):
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
        gates: torch.Tensor | None = None,
        beside: BesideHeads | None = None,
    ) -> torch.Tensor:
        if batch.whole is None or _is_beyond(layer, batch.cache):
            other = self._other(batch)
            return self._otherwise.attend_projected(layer, qkv, steps, table, other, gates, beside)
        if beside is not None:
            beside.compute()
        found = self.attend(layer, *steps.split(qkv, table), batch)
        return found if gates is None else open_values(found, gates)

    def head_places(self, layer: AttentionLayer, batch: FlashBatch) -> HeadPlaces | None:
        """See AttentionBackend. None where the kernel attends, since it reads new keys directly."""
        if batch.whole is not None and not _is_beyond(layer, batch.cache):
            return None
        return self._otherwise.head_places(layer, self._other(batch))

    def attend_written(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: FlashBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._otherwise.attend_written(layer, query, self._other(batch), gates)

    def _other(self, batch: FlashBatch) -> Any:
        if batch.other is None:
            batch.other = self._otherwise.prepare(batch.plan, batch.cache)
        return batch.other


def _is_beyond(layer: AttentionLayer, cache: KVCache) -> bool:
    """Return whether a layer is none of the kernel's.

    It has sinks, chunks, no keys of its own, heads that are too large, or values of another width.
    """
    other = layer.head_dim > MOST_FLASH or cache.value_dim(layer.index) != layer.head_dim
    return other or layer.sinks is not None or layer.reads_only or layer.chunk > 0
