"""Computes one layer of the generic decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend
from tgi_trio.shard.torch_backend.attention.paged.few_heads import HeadProjection
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.linears.few_rows import project
from tgi_trio.shard.torch_backend.layers.mlp import ExpertsMlp, Mlp
from tgi_trio.shard.torch_backend.layers.residual import Addends, add_and_normalise, settle
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.models.attending import Attending, RotaryTables
from tgi_trio.shard.torch_backend.models.feeding import feed_both, feed_forward
from tgi_trio.shard.torch_backend.models.layer import Layer
from tgi_trio.shard.torch_backend.models.projections import Mixed, Sums
from tgi_trio.shard.torch_backend.states.steps import EarlyMixer, StepStates


class LayerRunner:
    """Computes layers of a decoder on one rank."""

    def __init__(
        self,
        spec: DecoderSpec,
        layers: Sequence[Layer],
        rotaries: list[Rotary],
        ranks: Gathering | None,
    ) -> None:
        """`ranks`: those that divide the layers, None: each is whole."""
        self._spec = spec
        self._layers = layers
        self._ranks = ranks
        self._attend = Attending(spec, rotaries)
        self.sums = Sums(spec, divided=ranks is not None)
        # By number of the layer: what is done with its heads between linear and attention.
        self.head_steps = {
            i: self._attend.steps_of(layer.attention)
            for i, layer in enumerate(layers)
            if layer.attention is not None
        }
        # Likewise: the mixer that begins while these are rotated.
        self._early = {
            i: layer.mixer
            for i, layer in enumerate(layers)
            if layer.attention is not None and isinstance(layer.mixer, EarlyMixer)
        }

    def run(
        self,
        index: int,
        x: torch.Tensor,
        addends: Addends | None,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> tuple[torch.Tensor, Addends | None]:
        """Return hidden states, and what is still to be added to them before the next norm."""
        layer, awaited = self._layers[index], addends.later if addends else None
        if layer.attention is not None and self.sums.attends_alone(layer):
            x, mixed = self._attend_alone(index, x, addends, tables, attention, batch)
            addends = self.sums.of_attention(layer, self.reduce(mixed))
        elif layer.attention is not None or layer.mixer is not None:
            gate = layer.attention_norm_gate
            add = add_and_normalise if gate is None else gate.add_and_open
            x, normed = add(x, addends, layer.attention_norm)
            attended, kept = self._say(index, normed, tables, attention, batch, states)
            if attended is not None and kept is not None and self.sums.adds_each(layer):
                addends = self.sums.of_each(layer, attended, kept)
            else:
                mixed = self.sums.mix(layer, Mixed(attended, kept))
                addends = self.sums.of_attention(layer, self.reduce(mixed))
            if self._spec.parallel and layer.mlp is not None:
                inner = layer.mlp_norm(x) if layer.mlp_norm else normed
                beside = self.reduce(layer.mlp(inner))
                return x, self.sums.of_both(layer, addends, beside)
        x, addends = settle(x, addends, layer.attention_sum_norm)
        if layer.mlp is None:
            return settle(x, addends, layer.mlp_sum_norm)
        reduce = None if self._ranks is None else self._ranks.all_reduce
        if layer.later is not None:
            x, output, later = feed_both(layer.mlp, layer.later, layer, x, addends, reduce)
            return x, self.sums.of_mlp(layer, output)._replace(later=later)
        x, found = feed_forward(layer.mlp, layer, x, addends, reduce)
        addends = self.sums.of_mlp(layer, found)
        if awaited is not None:
            addends = addends._replace(second=awaited)
        return settle(x, addends, layer.mlp_sum_norm)

    def _attend_alone(
        self,
        index: int,
        x: torch.Tensor,
        addends: Addends | None,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` and `addends`, and this rank's partial sum of attention's output.

        For a layer in which only attention reads the norm of that sum.
        """
        layer, steps = self._layers[index], self.head_steps[index]
        own, norm = layer.attention, layer.attention_norm
        if own is None:
            raise ValueError(f"layer {index} does not attend")
        heads = HeadProjection(own.qkv, norm, steps)
        places = attention.head_places(own.shape, batch) if heads.turns(len(x), addends) else None
        if places is None:
            x, qkv = project(own.qkv, x, addends, norm)
            return x, self._attend(own, steps, qkv, tables, attention, batch)
        x, query = heads.project(x, addends, tables.get(own.rotary), places)
        return x, own.close(attention.attend_written(own.shape, query, batch))

    def use_block(
        self,
        index: int,
        x: torch.Tensor,
        first: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> Addends:
        """Return what is to be added to `x` [T, hidden]: the mixer's output for `x` joined with the
        output of a block that several layers share, for `x` and the first layer's input `first`.
        """
        layer, steps = self._layers[index], self.head_steps[index]
        own, mlp, use, mixer = layer.attention, layer.mlp, layer.shared, layer.mixer
        norm, mlp_norm = layer.attention_norm, layer.mlp_norm
        if own is None or mlp is None or use is None or mixer is None:
            raise ValueError(f"layer {index} uses a block that lacks parts")
        if norm is None or mlp_norm is None:
            raise ValueError(f"layer {index} uses a block that lacks parts")
        both = norm(torch.cat((x, first), dim=-1))
        attended = self._attend(own, steps, own.qkv(both), tables, attention, batch)
        attended = self.reduce(attended)
        output = self.reduce(mlp(mlp_norm(attended)))
        mixed = self.reduce(self._keep(index, mixer.inner(use.join(x, output)), states))
        return self.sums.of_attention(layer, mixed)

    def mix(
        self,
        index: int,
        normed: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> torch.Tensor:
        """Return the sum of attention's and mixer's outputs for `normed` [T, hidden]."""
        found = self._say(index, normed, tables, attention, batch, states)
        return self.reduce(self.sums.mix(self._layers[index], found))

    def _say(
        self,
        index: int,
        normed: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None,
    ) -> Mixed:
        """Return this rank's partial sums of attention's and mixer's outputs."""
        layer = self._layers[index]
        (qkv, inner), attended = layer.project(normed), None
        begun = self._begin(index, inner, states)
        if layer.attention is not None and qkv is not None:
            hidden = normed if layer.attention.reads_input else None
            given = self.head_steps[index], qkv, tables, attention, batch, hidden, begun
            attended = self._attend(layer.attention, *given)
        kept = None if inner is None else self._keep(index, inner, states, begun)
        return Mixed(attended, kept)

    def _begin(
        self, index: int, inner: torch.Tensor | None, states: StepStates | None
    ) -> BesideHeads | None:
        """Return how a mixer beside attention begins, given the output of its `inner`."""
        mixer = self._early.get(index)
        if mixer is None or inner is None or states is None:
            return None
        return mixer.begin(inner, states.layers[index], states.steps)

    def attend(
        self,
        index: int,
        qkv: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        beside: BesideHeads,
    ) -> torch.Tensor:
        """Return attention's output [T, hidden] for the output `qkv` of its first linear.

        What is `beside` its heads is computed as well.
        """
        own = self._layers[index].attention
        if own is None:
            raise ValueError(f"layer {index} does not attend")
        steps = self.head_steps[index]
        found = self._attend(own, steps, qkv, tables, attention, batch, beside=beside)
        return self.reduce(found)

    def _keep(
        self,
        index: int,
        inner: torch.Tensor,
        states: StepStates | None,
        begun: BesideHeads | None = None,
    ) -> torch.Tensor:
        """Return this rank's partial sum of the mixer's output for that of its `inner` [T, ...].

        `begun`: what has been computed beside attention's heads, if the mixer began there.
        """
        mixer = self._layers[index].mixer
        if mixer is None or states is None:
            raise ValueError(f"layer {index} keeps states, and the step has none")
        if begun is not None:
            early = self._early[index]
            return early.go_on(inner, begun.found, states.layers[index], states.steps)
        return mixer.mix(inner, states.layers[index], states.steps)

    def feed(
        self, mlp: Mlp, x: torch.Tensor, ids: torch.Tensor | None = None
    ) -> torch.Tensor | ExpertParts:
        """Return what an MLP says of `x` [T, hidden]: of experts on one rank, what is to be summed.

        `ids`: the tokens, int64 [T], for tables of experts.
        """
        if not isinstance(mlp, ExpertsMlp):
            return self.reduce(mlp(x))
        return mlp.find(x, x, ids) if self._ranks is None else self.reduce(mlp(x, ids=ids))

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, which divide a layer."""
        return x if self._ranks is None else self._ranks.all_reduce(x)
