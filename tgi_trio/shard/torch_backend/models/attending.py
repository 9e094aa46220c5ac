"""Attention of a decoder's layers: from projections to queries, keys and values, and the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
)
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.norm import DividedNorm
from tgi_trio.shard.torch_backend.models.layer import Attention

RotaryTables = dict[int, RotaryTable]  # a step's cosines and sines, by number of the rotary


def make_tables(
    rotaries: Sequence[Rotary], positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
) -> RotaryTables:
    """Return the tables that rotate queries and keys at `positions`, by number of the rotary."""
    return {i: rotary.table(positions, lengths, dtype) for i, rotary in enumerate(rotaries)}


class Attending:
    """Attention on one rank, as a function of a layer's weights and a step's backend."""

    def __init__(self, spec: DecoderSpec, rotaries: list[Rotary]) -> None:
        self._spec = spec
        self._rotaries = rotaries

    def steps_of(self, layer: Attention) -> HeadSteps:
        """Return what is done with a layer's heads before they attend."""
        shape, spec = layer.shape, self._spec
        return HeadSteps(
            heads=shape.heads,
            kv_heads=0 if shape.reads_only else shape.kv_heads,
            head_dim=shape.head_dim,
            clip=0.0 if layer.query_norm else spec.qkv_clip,
            norm=spec.norm,
            eps=spec.norm_eps,
            gain=layer.head_norm,
            bias=layer.head_norm_bias,
            rotary=self._rotaries[layer.rotary] if layer.rotary >= 0 else None,
            norm_last=spec.norm_after_rotary,
            norm_whole=layer.norm_whole,
            value_dim=layer.value_dim,
            keys_as_values=layer.keys_as_values,
            value_norm=spec.value_norm,
            value_scale=spec.value_scale,
        )

    def __call__(
        self,
        layer: Attention,
        steps: HeadSteps,
        qkv: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        hidden: torch.Tensor | None = None,
        beside: BesideHeads | None = None,
    ) -> torch.Tensor:
        """Return this rank's partial sum of attention's output, given the output of `layer.qkv`.

        `hidden` [T, hidden]: the layer's input, if its index reads it. What is `beside` heads is
        computed as well.
        """
        if beside is not None and not layer.plain:
            beside.compute()
        if layer.shared_key is not None:
            own, turn = layer.shared_key, self._rotaries[layer.rotary]
            turns = tables[layer.rotary]
            found = attention.attend_shared_key(layer.shape, qkv, own, turn, turns, batch)
            return layer.close(own.group(found))
        gate = index_queries = None
        if layer.pooled is not None:
            qkv, index_queries = qkv.split(
                (qkv.shape[-1] - layer.pooled.width, layer.pooled.width), dim=-1
            )
        if width := layer.shape.heads * self._gates_of_head(layer):
            qkv, gate = qkv.split((qkv.shape[-1] - width, width), dim=-1)
        if layer.latent is not None:
            opening, after = self._divide_gates(gate)
            values = self._attend_latents(
                layer, layer.latent, qkv, tables, attention, batch, hidden, opening
            )
            return self._close(layer, values, after)
        if layer.blocks is not None:
            table = tables.get(layer.rotary)
            attended = attention.attend_blocks(layer.shape, qkv, steps, layer.blocks, table, batch)
            return layer.close(attended)
        if layer.query_norm and layer.key_norm:
            qkv = self._normalise_whole(layer, layer.query_norm, layer.key_norm, qkv)
        table, shape = tables.get(layer.rotary), layer.shape
        opening, after = self._divide_gates(gate)
        if layer.pooled is not None and index_queries is not None:
            pooled = layer.pooled
            attended = attention.attend_pooled(
                *(shape, qkv, index_queries, steps, pooled, table, batch), gates=opening
            )
        else:
            attended = attention.attend_projected(shape, qkv, steps, table, batch, opening, beside)
        return self._close(layer, attended, after)

    def _divide_gates(
        self, gates: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gates that attention opens, and those that are opened behind it."""
        return (gates, None) if self._spec.gate_activation == "sigmoid" else (None, gates)

    @staticmethod
    def _close(layer: Attention, output: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's partial sum for what heads say.

        It is multiplied by one gate of each head or one of each number, if there are such.
        """
        if gate is None:
            return layer.close(output)
        by_head = (layer.shape.heads, -1)
        opened = functional.softplus(gate.float()).to(gate.dtype).unflatten(-1, by_head)
        return layer.close((output.unflatten(-1, by_head) * opened).flatten(-2))

    def _gates_of_head(self, layer: Attention) -> int:
        """Return the number of gates of each head's output; 0: there are none."""
        if self._spec.gated_values and layer.latent is not None:
            return 0 if layer.latent.spec.doubled else layer.latent.spec.value_dim
        return layer.shape.head_dim if self._spec.gated_attention else int(self._spec.gated_heads)

    def _attend_latents(
        self,
        layer: Attention,
        latent: LatentProjections,
        qkv: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        hidden: torch.Tensor | None,
        gates: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the values of weighted sums of latents, [T, heads * value_dim]."""
        if self._spec.index is not None:
            turns = [(own, tables[i]) for i, own in enumerate(self._rotaries)]
            return attention.attend_indexed(
                *(layer.shape, qkv, latent, layer.index, layer.rotary, turns, batch, hidden, gates)
            )
        rotary, table = self._rotaries[layer.rotary], tables[layer.rotary]
        return attention.attend_latents(layer.shape, qkv, latent, rotary, table, batch, gates)

    def _normalise_whole(
        self, layer: Attention, query_norm: DividedNorm, key_norm: DividedNorm, qkv: torch.Tensor
    ) -> torch.Tensor:
        """Normalise a token's query heads all together, and its key heads likewise (OLMo 2).

        Where ranks have some of the heads each.
        """
        shape = layer.shape
        if self._spec.qkv_clip:
            qkv = qkv.clamp(-self._spec.qkv_clip, self._spec.qkv_clip)
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q, k, v = qkv.split((query, key, key), dim=-1)
        return torch.cat((query_norm(q), key_norm(k), v), dim=-1)
