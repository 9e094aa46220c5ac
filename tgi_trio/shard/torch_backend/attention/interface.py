"""What every attention backend is given and answers.

A backend is made once per loaded model. Once per step `prepare` turns the plan into whatever the
backend wants to know (index tensors, sequence lengths on the device); the result is handed back at
every layer, so that nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.layers.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.rotary import Rotary
from tgi_trio.shard.torch_backend.staging import Array


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Static facts of one layer's attention, as this rank computes it."""

    index: int  # layer of the KV cache
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # a query sees this many tokens, itself included; 0 = all
    chunk: int = 0  # positions from one multiple of it to the next see each other alone; 0 = all
    ahead: bool = True  # queries see as far as `StepPlan.visible` says; else as everywhere
    soft_cap: float = 0.0  # 0 = none
    slopes: torch.Tensor | None = None  # ALiBi: float32 [heads], added as slope * key position
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of K and V of 8 bits; see `KVCache.write`
    # Where keys are their own values: how much of their beginning is asked for. A backend may
    # return all of it. 0: values are apart.
    value_dim: int = 0
    # K and V are another layer's, whose `index` this one has: nothing is written.
    reads_only: bool = False
    most: int = 0  # tokens that an index chooses; 0: all are attended to
    # float32 [heads]: scores that take their share of the softmax and add nothing
    sinks: torch.Tensor | None = None


class HeadPlaces(NamedTuple):
    """Where the new keys and values of a layer go, in a cache that holds numbers."""

    key: torch.Tensor  # [slots, kv_heads, head_dim], as are values
    value: torch.Tensor
    slots: torch.Tensor  # int64 [T]


class PlanLayout(Protocol):
    """Turns a plan into what a model's forward wants to know of it."""

    name: str

    def prepare(self, plan: StepPlan, cache: KVCache) -> Any:
        """Return what attention needs of the plan, on the device."""
        ...


class AttentionBackend(PlanLayout, Protocol):
    """Causal attention of the plan's tokens over their sequences."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Any,
    ) -> torch.Tensor:
        """Write K and V [T, kv_heads, head_dim] to their slots; return [T, heads * head_dim].

        Values may be narrower, and what is returned then is so. Where a layer `reads_only`, K and V
        have no heads: those that are there already are read. `query` is [T, heads, head_dim]. A
        token sees the tokens of its own sequence at its own and earlier positions, those already in
        the cache included.
        """
        ...

    def attend_projected(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        steps: HeadSteps,
        table: RotaryTable | None,
        batch: Any,
    ) -> torch.Tensor:
        """Do what `attend` does from what the layer projects, [T, all heads * head_dim].

        `table`: the step's cosines and sines of the layer's rotary, None without one.
        """
        query, key, value = steps.split(qkv, table)
        return self.attend(layer, query, key, value, batch)

    def head_places(self, layer: AttentionLayer, batch: Any) -> HeadPlaces | None:
        """Return where K and V may be written before `attend_written`; None: nowhere."""
        return None

    def attend_written(
        self, layer: AttentionLayer, query: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Do what `attend` does with K and V that are in their `head_places`."""
        raise RuntimeError(f"{self.name} has no places that others write to")

    def attend_latents(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        rotary: Rotary,
        table: RotaryTable,
        batch: Any,
    ) -> torch.Tensor:
        """Do what `attend` does from what a layer of latents projects."""
        return attend_latents_apart(self, layer, projected, latent, rotary, table, batch)


def attend_heads(
    attention: AttentionBackend,
    layer: AttentionLayer,
    qkv: torch.Tensor,
    steps: HeadSteps,
    table: RotaryTable | None,
    batch: Any,
) -> torch.Tensor:
    """Do what `AttentionBackend.attend_projected` does, also where no kernel takes the steps."""
    if steps.apart:
        return attention.attend(layer, *steps.split(qkv, table), batch)
    return attention.attend_projected(layer, qkv, steps, table, batch)


def attend_latents_apart(
    attention: AttentionBackend,
    layer: AttentionLayer,
    projected: torch.Tensor,
    latent: LatentProjections,
    rotary: Rotary,
    table: RotaryTable,
    batch: Any,
) -> torch.Tensor:
    """Do what `AttentionBackend.attend_latents` does by `attend`."""
    query, key = latent.query_and_key(
        projected, lambda part: rotary.apply(part, table.cos, table.sin)
    )
    if table.query_scale is not None:
        query = query * table.query_scale
    return attention.attend(layer, query, key, key, batch)


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """Where a batch of decodes that stays where it is says what each of them reads and writes."""

    slots: torch.Tensor  # int64 [T] where new K and V go
    contexts: torch.Tensor  # int32 [T]
    tables: torch.Tensor  # int32: rows of `width` block numbers
    width: torch.Tensor  # int32 [1]


class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose work on a batch of some size can be recorded once and replayed.

    Its launches depend on nothing but the batch's shape; what a step changes lies in tensors of
    the batch that stay where they are.
    """

    def arrays(self, plan: StepPlan) -> list[Array]:
        """Return what a batch is told of a plan: slots and contexts first, its block tables last.

        The others have the same sizes for as many tokens in as many rows; of decodes of the same
        rows over the same tables only the first two differ.
        """
        ...

    def reserve(
        self, plan: StepPlan, cache: KVCache, memory: torch.Tensor, *, decodes: bool = True
    ) -> Any:
        """Return what `prepare` does, over `memory`, uint8.

        It has at its beginning what `Staging.fill` puts there of `arrays(plan)`; later those of
        plans of as many decodes, whose tables are no wider. If not `decodes`, of plans of as many
        tokens in as many rows, however they share them, and what is made here is good for one run.
        """
        ...

    def places(self, batch: Any) -> DecodePlaces:
        """Return what may be moved on the device before a reserved batch is attended to."""
        ...
