"""The generic decoder: token ids of a step in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionBackend,
    AttentionKind,
    AttentionNeeds,
)
from tgi_trio.shard.torch_backend.attention.paged.few_heads import HeadProjection
from tgi_trio.shard.torch_backend.kv_cache import KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.activation import soft_cap
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.linears.few_rows import Projection, project_normed
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import PerLayerInputs
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
)
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import Streams
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import HyperEnds
from tgi_trio.shard.torch_backend.layers.vocabulary import (
    ChangeEmbedded,
    Gathering,
    embed,
    gather_logits,
)
from tgi_trio.shard.torch_backend.models.attending import RotaryTables, make_tables
from tgi_trio.shard.torch_backend.models.beginning import Begin, Beginning, Begun
from tgi_trio.shard.torch_backend.models.cross_tokens import cross, find_cross_tokens
from tgi_trio.shard.torch_backend.models.feeding import leave_layer
from tgi_trio.shard.torch_backend.models.hyper_connected import run_hyper_connected
from tgi_trio.shard.torch_backend.models.layer import Layer
from tgi_trio.shard.torch_backend.models.layer_runner import LayerRunner
from tgi_trio.shard.torch_backend.models.projections import (
    list_head_projections,
    list_linears,
    list_projections,
)
from tgi_trio.shard.torch_backend.models.streamed import run_streamed
from tgi_trio.shard.torch_backend.states.pool import StateShapes, list_state_shapes
from tgi_trio.shard.torch_backend.states.steps import StepStates
from tgi_trio.shard.torch_backend.step_features import StepFeatures


class Ranks(Gathering, Protocol):
    """What a rank calls to communicate with the others."""

    @property
    def parts(self) -> Ranks | None:
        """Those that divide this rank's layers among them; None: it has its layers alone."""

    def rehearsing(self) -> AbstractContextManager[None]: ...
    def broadcast(self, x: torch.Tensor) -> torch.Tensor: ...
    def least(self, value: int, device: torch.device) -> int: ...
    def send(self, x: torch.Tensor, to: int) -> None: ...
    def receive(self, x: torch.Tensor, sender: int) -> torch.Tensor: ...


class Decoder:
    """A model on one rank. It holds weights alone: the KV cache and states are the caller's."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        layers: list[Layer],
        rotaries: list[Rotary],
        embedding: torch.Tensor,
        positions: torch.Tensor | None,
        embedding_norm: Norm | None,
        final_norm: Norm | None,
        head: Linear,
        vocabulary: slice | None = None,
        ranks: Ranks | None = None,
        per_layer_inputs: PerLayerInputs | None = None,
        streams: Streams | None = None,
        hyper: HyperEnds | None = None,
        embedding_in: Linear | None = None,
        embedding_out: Linear | None = None,
    ) -> None:
        """`vocabulary`: the tokens whose rows `embedding` and `head` have; None: all."""
        self.spec = spec
        self.layers = layers
        self.rotaries = rotaries
        self.embedding = embedding
        self.positions = positions
        self.embedding_norm = embedding_norm
        self.final_norm = final_norm
        self.head = head
        self.vocabulary = vocabulary or slice(0, spec.vocab_size)
        self.ranks = ranks
        self.per_layer_inputs = per_layer_inputs
        self.streams = streams
        self.hyper = hyper
        self.embedding_in = embedding_in
        self.embedding_out = embedding_out
        plain = ranks is None and positions is None and embedding_norm is None
        plain = plain and embedding_in is None
        self.beginning = Beginning(embedding, spec.embedding_scale, rotaries if plain else ())
        # Returns the head for a step in which rows have adapters; None: there are none.
        self.choose_head: Callable[[], Linear] | None = None
        self.change_embedded: ChangeEmbedded | None = None  # likewise
        self.taps: tuple[int, ...] = ()  # layers whose inputs `forward` returns as well
        self._runner = LayerRunner(spec, layers, rotaries, ranks)

    predicts_prompt = True

    @property
    def kv_shape(self) -> KVShape:
        attending = [layer.attention for layer in self.layers if layer.attention is not None]
        sizes = [
            KVSize(own.shape.kv_heads, own.shape.head_dim, own.value_dim)
            for own in attending
            if not own.shape.reads_only
        ]
        indices = (own.blocks or own.pooled for own in attending)
        sizes += (KVSize(1, index.spec.dim, 0) for index in indices if index is not None)
        turned = (self.rotaries[own.rotary].axes for own in attending if own.pooled is not None)
        turns = any(axes is not None for axes in turned)
        return KVShape.of(sizes, same=not self.spec.keeps_values, turns=turns)

    @property
    def state_shapes(self) -> StateShapes:
        """Return the shapes of layers' states per sequence on this rank, by number of the layer."""
        ranks = 1 if self.ranks is None else self.ranks.size
        return list_state_shapes(self.spec.layers, ranks)

    @property
    def scans_in_turns(self) -> bool:
        """Whether any layer's recordings have room for few tokens; see `MixerLayer.in_turns`."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        return any(mixer.in_turns for mixer in mixers)

    def linears(self) -> Iterator[Linear]:
        """Yield the linears that every token is multiplied with."""
        yield from list_linears(self.layers)
        yield self.head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, queries, keys and values."""
        return self.embedding.dtype

    def projections(self) -> Iterator[Projection]:
        """Yield those of `linears` that read a norm; in layers, the norm of a sum."""
        if self.hyper is None:  # otherwise layers read a norm of several hidden states
            yield from list_projections(self.layers, self._runner.sums)
        if self.final_norm is not None and self.embedding_out is None:
            yield Projection(self.head, self.final_norm, None, None)

    def head_projections(self) -> Iterator[tuple[HeadProjection, Addends | None]]:
        """Yield projections of heads, with what is added before them: None in the first layer."""
        return list_head_projections(self.layers, self._runner.sums, self._runner.head_steps)

    @property
    def prefix_reuse(self) -> bool:
        """Whether a token's K and V depend on nothing but the tokens up to it."""
        return not self.needs_lengths

    @property
    def attention_needs(self) -> AttentionNeeds:
        """What the model asks of its attention backend."""
        attending = [layer.attention for layer in self.layers if layer.attention is not None]
        shared = ((own.shape, own.shared_key) for own in attending)
        layers = tuple((shape, own.entries) for shape, own in shared if own is not None)
        kind: AttentionKind = "entries" if self.spec.shared_key else "all"
        most = 0
        blocks = next((own.blocks for own in attending if own.blocks), None)
        pooled = next((own.pooled for own in attending if own.pooled), None)
        if self.spec.index is not None:
            kind, most = "tokens", self.spec.index.most
        elif blocks is not None:
            kind, most = "blocks", blocks.spec.most * blocks.spec.size
        elif pooled is not None:
            kind, most = "pooled", (pooled.spec.most + 1) * pooled.spec.size - 1
        rank = max((own.shape.value_dim for own in attending), default=0)
        return AttentionNeeds(self.kv_shape, kind, most=most, rank=rank, layers=layers)

    @property
    def capturable(self) -> bool:
        """Whether decodes launch the same kernels whatever the tokens are, attention apart."""
        return self.groups_experts

    @property
    def groups_experts(self) -> bool:
        """Whether all experts of a mixture are computed at once, rather than one by one."""
        mixtures = (own for layer in self.layers for own in layer.mixtures())
        return all(own.grouped is not None for own in mixtures)

    @property
    def needs_lengths(self) -> bool:
        """Whether `forward` reads `lengths`."""
        return any(rotary.by_length for rotary in self.rotaries)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None = None,
        *,
        features: StepFeatures | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, hidden] before the final norm, with those of `taps` appended.

        `token_ids`, `lengths`: int64 [T]; `positions`: int64 [T], or [3, T] as
        `StepPlan.rotary_positions`; `batch`: from `AttentionBackend.prepare`; `states`: needed if
        there are `state_shapes`.
        """
        changed = self.change_embedded is not None and self.change_embedded.used
        at_once = features is None and not changed and self.beginning.serves(positions)
        begin: Begin = self.beginning if at_once else self.begin
        x, tables = begin(token_ids, positions, lengths)
        own = None
        if features is not None:
            x, features = self.place(x, features)
        if self.per_layer_inputs is not None:
            ids = token_ids if features is None else self.per_layer_inputs.hide(token_ids, features)
            own = self.per_layer_inputs.of(ids, x, self.ranks)
        return self.run_layers(
            x, tables, attention, batch, states, features=features, own=own, ids=token_ids
        )

    def begin(
        self, token_ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor
    ) -> Begun:
        """Return the first layer's input, and rotations of queries and keys; see `forward`."""
        x = self.embed(token_ids, positions)
        return x, make_tables(self.rotaries, positions, lengths, x.dtype)

    def place(self, x: torch.Tensor, features: StepFeatures) -> tuple[torch.Tensor, StepFeatures]:
        """Return the embeddings [T, hidden] with images' features in their places, and these
        features, which rank 0 alone is given, as every rank has them.
        """
        if self.ranks is not None:
            features = features.share(self.ranks, self.spec.hidden_size)
        return features.place(x), features

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input [T, hidden] for tokens int64 [T]."""
        spec = self.spec
        x = embed(token_ids, self.embedding, self.vocabulary, self.ranks)
        if self.change_embedded is not None and self.change_embedded.used:
            x = self.change_embedded(token_ids, x)
        if spec.embedding_scale != 1.0:
            # Rounded to the dtype first, as Gemma was trained.
            x = x * torch.tensor(spec.embedding_scale, dtype=x.dtype)
        if self.embedding_in is not None:
            x = self.embedding_in(x)
        if self.positions is not None:
            x = x + functional.embedding(positions + spec.position_offset, self.positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x

    def run_layers(
        self,
        x: torch.Tensor,
        tables: RotaryTables,
        attention: AttentionBackend,
        batch: Any,
        states: StepStates | None = None,
        *,
        features: StepFeatures | None = None,
        own: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of all layers for the input `x` [T, hidden]; the rest as in `forward`.

        `own` [layers, T, width]: the layers' own embeddings of the tokens, if they have such;
        `ids` int64 [T]: the tokens, for layers with tables of their experts.
        """

        def mix(index: int, normed: torch.Tensor) -> torch.Tensor:
            return self._runner.mix(index, normed, tables, attention, batch, states)

        def attend(index: int, qkv: torch.Tensor, beside: BesideHeads) -> torch.Tensor:
            return self._runner.attend(index, qkv, tables, attention, batch, beside)

        if self.streams is not None and own is not None:
            return run_streamed(self.streams, self.layers, x, own, attend, self._runner.reduce)
        if self.hyper is not None:
            return run_hyper_connected(self.hyper, self.layers, x, ids, mix, self._runner.feed)
        first = x
        addends: Addends | None = None
        tapped: dict[int, torch.Tensor] = {}
        cross_tokens = find_cross_tokens(self.spec, features, x)
        for i in range(len(self.layers)):
            if i in self.taps:  # the layer computes this sum again, as it does without taps
                tapped[i] = add_and_normalise(x, addends, None)[0]
            if (cross_attention := self.layers[i].cross_attention) is not None:
                if cross_tokens is not None:
                    x, addends = add_and_normalise(x, addends, None)[0], None
                    x = cross(self.layers[i], cross_attention, x, cross_tokens, self._runner.reduce)
            elif self.layers[i].shared is None:
                x, addends = self._runner.run(i, x, addends, tables, attention, batch, states)
            else:
                x = add_and_normalise(x, addends, None)[0]
                addends = self._runner.use_block(i, x, first, tables, attention, batch, states)
            x, addends = leave_layer(self.layers[i], x, addends, None if own is None else own[i])
            if features is not None and i in features.deep:
                x, addends = features.deepen(add_and_normalise(x, addends, None)[0], i), None
        hidden = add_and_normalise(x, addends, None)[0]
        if not self.taps:
            return hidden
        return torch.cat((hidden, *(tapped.get(i, hidden) for i in self.taps)), dim=-1)

    def keep_positions(self, most: int) -> None:
        """Keep tables of the positions below `most`; no others may be computed afterwards."""
        for rotary in self.rotaries:
            rotary.keep(most, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, vocab] for `hidden`, rows of what `forward` returns."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `logits` in the dtype in which the head computes them."""
        if hidden.shape[1] > self.spec.hidden_size:  # what drafters read is behind it
            hidden = hidden[:, : self.spec.hidden_size].contiguous()
        norm, extra = self.final_norm, self.spec.extra_tokens
        if self.embedding_out is not None:
            hidden = self.embedding_out(hidden if norm is None else norm(hidden))
            norm = None
        head = self.head if self.choose_head is None else self.choose_head()
        own = head(hidden) if norm is None else project_normed(head, hidden, norm)
        logits = gather_logits(own, self.spec.vocab_size - extra, self.ranks)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.final_soft_cap:
            logits = soft_cap(logits, self.spec.final_soft_cap)
        return functional.pad(logits, (0, extra), value=float("-inf")) if extra else logits

    def nbytes(self) -> int:
        """Return the bytes of all weights; a head that is the embedding itself is counted once."""
        total = self.embedding.nbytes + sum(layer.nbytes() for layer in self.layers)
        if self.head.weight is not self.embedding:
            total += self.head.nbytes()
        ends = self.embedding_in, self.embedding_out
        for part in (*ends, self.per_layer_inputs, self.streams, self.hyper):
            total += 0 if part is None else part.nbytes()
        return total + (self.positions.nbytes if self.positions is not None else 0)
