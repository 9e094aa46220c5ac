"""The interface of attention backends.

A backend is made once per loaded model. Once per step, `prepare` turns the plan into whatever the
backend needs (index tensors, sequence lengths on the device); every layer is given the result, so
that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.attention.shared_key import Entries, SharedKey
from tgi_trio.shard.torch_backend.layers.opening import open_values
from tgi_trio.shard.torch_backend.staging import Array


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Constants of one layer's attention on this rank."""

    index: int  # layer of the KV cache
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # tokens that a query sees, itself included; 0: all
    chunk: int = 0  # size of chunks of positions that see only each other; 0: no chunks
    ahead: bool = True  # queries see as far as `StepPlan.visible` says, where a plan has it
    soft_cap: float = 0.0  # 0 = none
    slopes: torch.Tensor | None = None  # ALiBi: float32 [heads], added as slope * key position
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of K and V of 8 bits; see `KVCache.write`
    # Where keys serve as values: the leading numbers that are needed of them. A backend may return
    # all of them. 0: values are separate.
    value_dim: int = 0
    # The layer reads the K and V of another one, which has the same `index`, and writes none.
    reads_only: bool = False
    most: int = 0  # tokens that an index chooses; 0: all are attended to
    chosen_last: bool = False  # no layer behind goes on with the choice that this one attends to
    # float32 [heads]: scores that take part in the softmax but have no value
    sinks: torch.Tensor | None = None


# What the tokens that are attended to are, besides all those of a sequence (or of a window): tokens
# or blocks of tokens that an index chooses, blocks with one index key each, entries of runs.
AttentionKind = Literal["all", "tokens", "blocks", "pooled", "entries"]


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of its attention backend."""

    shape: KVShape
    kind: AttentionKind = "all"
    most: int = 0  # tokens that an index chooses: rows with no more see all; 0: there is no index
    rank: int = 0  # numbers of a latent, the largest; 0: keys are not their own values
    # Of "entries": all layers with one key per token, and what makes their entries.
    layers: tuple[tuple[AttentionLayer, Entries | None], ...] = ()


class HeadPlaces(NamedTuple):
    """Where a layer's new keys and values are written, in a cache of plain numbers."""

    key: torch.Tensor  # [slots, kv_heads, head_dim]
    value: torch.Tensor  # [slots, kv_heads, numbers of a value]
    slots: torch.Tensor  # int64 [T]


class PlanLayout(Protocol):
    """Turns a plan into what a model's forward pass needs."""

    name: str

    def prepare(self, plan: StepPlan, cache: KVCache) -> Any:
        """Return what attention needs to know about the plan, on the device."""
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

        `query` is [T, heads, head_dim]. Values may be narrower than keys, and so is the result.
        Where a layer `reads_only`, K and V have no heads, and those in the cache are read. A token
        sees the tokens of its own sequence up to its own position, including those in the cache.
        """
        ...

    def attend_projected(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        steps: HeadSteps,
        table: RotaryTable | None,
        batch: Any,
        gates: torch.Tensor | None = None,
        beside: BesideHeads | None = None,
    ) -> torch.Tensor:
        """Compute `attend` from a layer's projections, [T, all heads * head_dim].

        `table`: the step's cosines and sines for the layer's rotary embedding; None without one.
        `gates`: as for `open_values`, if what heads say has such. What is `beside` heads is
        computed as well.
        """
        if beside is not None:
            beside.compute()
        found = self.attend(layer, *steps.split(qkv, table), batch)
        return found if gates is None else open_values(found, gates)

    def head_places(self, layer: AttentionLayer, batch: Any) -> HeadPlaces | None:
        """Return where K and V may be written ahead of `attend_written`; None if nowhere."""
        return None

    def attend_written(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: Any,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `attend` with K and V that have been written to their `head_places`.

        `gates`: as for `attend_projected`.
        """
        raise RuntimeError(f"{self.name} has no places that others write to")

    def attend_latents(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        rotary: Rotary,
        table: RotaryTable,
        batch: Any,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return values [T, heads * value_dim] of `attend` from projections of a layer of latents.

        `gates`: as for `expand_values`, if values have such.
        """
        return attend_latents_apart(self, layer, projected, latent, rotary, table, batch, gates)

    def attend_indexed(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        index: TokenIndex | None,
        rotary: int,
        turns: Sequence[tuple[Rotary, RotaryTable]],
        batch: Any,
        hidden: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `attend_latents` over the tokens that `index` chooses.

        `index` None: over those that the layer before has chosen. `projected`: as for latents, then
        what an index adds (`TokenIndex.split`). `turns`: all rotary embeddings of the model with
        the step's tables; the latents' is number `rotary`. `hidden` [T, hidden]: the layer's input,
        where an index reads it. `gates`: of values, if these are not made as queries are
        (`LatentProjections.open`).
        """
        raise RuntimeError(f"{self.name} has no index of tokens")

    def attend_blocks(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        steps: HeadSteps,
        index: BlockIndex,
        table: RotaryTable | None,
        batch: Any,
    ) -> torch.Tensor:
        """Compute `attend_projected` over the blocks that `index` chooses.

        `projected`: as there, then the queries and the key of the index.
        """
        raise RuntimeError(f"{self.name} has no index of blocks")

    def attend_pooled(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        index_queries: torch.Tensor,
        steps: HeadSteps,
        index: PooledIndex,
        table: RotaryTable | None,
        batch: Any,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `attend_projected` over the blocks that `index` chooses by one key of each.

        `index_queries` [T, width]: what the index projects of the tokens.
        """
        raise RuntimeError(f"{self.name} has no index of blocks with one key each")

    def attend_shared_key(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        shared: SharedKey,
        turning: Rotary,
        table: RotaryTable,
        batch: Any,
    ) -> torch.Tensor:
        """Return attention [T, heads, dim] to a window's keys and to entries, after writing them.

        `projected` [T, outputs]: of the layer's first linear. Values are rotated as keys are, by
        `turning` with the step's `table`, so that what is returned has been rotated back.
        """
        raise RuntimeError(f"{self.name} has no entries")


def attend_latents_apart(
    attention: AttentionBackend,
    layer: AttentionLayer,
    projected: torch.Tensor,
    latent: LatentProjections,
    rotary: Rotary,
    table: RotaryTable,
    batch: Any,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `AttentionBackend.attend_latents` by means of `attend`."""
    latent.scale(projected, table)
    query, key = latent.query_and_key(
        projected, lambda part: rotary.apply(part, table.cos, table.sin)
    )
    if table.query_scale is not None:
        query = query * table.query_scale
    return latent.values(attention.attend(layer, query, key, key, batch), gates)


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """The tensors of a reserved batch that say what each decode reads and writes."""

    slots: torch.Tensor  # int64 [T]: where new K and V are written
    contexts: torch.Tensor  # int32 [T]
    tables: torch.Tensor  # int32: rows of `width` block numbers
    width: torch.Tensor  # int32 [1]


class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose launches for a batch can be captured once and replayed.

    The launches depend only on the batch's shape; what changes from step to step is in tensors of
    the batch, which do not move.
    """

    def arrays(self, plan: StepPlan) -> list[Array]:
        """Return a plan's arrays for a batch: slots and contexts first, block tables last.

        The others have the same sizes for as many tokens in as many rows. Between decodes of the
        same rows over the same tables, only the first two differ.
        """
        ...

    def reserve(
        self, plan: StepPlan, cache: KVCache, memory: torch.Tensor, *, decodes: bool = True
    ) -> Any:
        """Return a batch, as `prepare` does, that reads `memory`, uint8.

        `Staging.fill` has written `arrays(plan)` to the beginning of `memory`, and later writes
        those of other plans: of as many decodes, with tables that are no wider. If not `decodes`,
        of as many tokens, divided among as many rows in any way; the batch then serves for one run
        of the layers.
        """
        ...

    def places(self, batch: Any) -> DecodePlaces:
        """Return the tensors that the device may change before a reserved batch is used."""
        ...
