"""Loads this rank's part of a decoder from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from tgi_trio.model.fit.decoder import check_supported
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.layer_work import find_run
from tgi_trio.model.matrices.references import LinearRef, run_of
from tgi_trio.model.matrices.roles import (
    BesideRefs,
    ExpertsRefs,
    LayerRefs,
    LowRankRefs,
    MlpRefs,
    NgramsRefs,
    NormGateRefs,
    OuterRefs,
    PerLayerInputRefs,
    PerLayerInputsRefs,
    SharedRefs,
)
from tgi_trio.model.specs.decoder import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    PerLayerInputsSpec,
    SharedBlock,
)
from tgi_trio.model.stages import Stage, check_stages
from tgi_trio.shard.positions.sines import sine_positions
from tgi_trio.shard.torch_backend.layers.activation import SparseActivation, activation
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.beside import ExpertsBeside
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp, Mlp
from tgi_trio.shard.torch_backend.layers.norm_gate import NormGate
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import PerLayerInput, PerLayerInputs
from tgi_trio.shard.torch_backend.layers.shared_block import SharedLinear, SharedUse
from tgi_trio.shard.torch_backend.models.attention_loading import AttentionLoader
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks
from tgi_trio.shard.torch_backend.models.gated import GatedDecoder
from tgi_trio.shard.torch_backend.models.layer import Attention, Layer
from tgi_trio.shard.torch_backend.models.mixer_loading import load_mixer, load_ngrams, mixer_scale
from tgi_trio.shard.torch_backend.models.mlp_loading import (
    load_beside,
    load_dense_mlp,
    load_experts,
)
from tgi_trio.shard.torch_backend.models.staged import StagedDecoder
from tgi_trio.shard.torch_backend.models.stream_loading import (
    load_hyper_ends,
    load_layer_gates,
    load_layer_hyper,
    load_layer_streams,
    load_streams,
)
from tgi_trio.shard.torch_backend.states.ngrams_layer import NgramsLayer
from tgi_trio.shard.torch_backend.weights import WeightSource


def load_decoder(spec: DecoderSpec, source: WeightSource, ranks: Ranks | None = None) -> Decoder:
    """Read every weight of `spec`.

    Linears are packed as they are read, so that only one layer at a time is in memory twice. Heads,
    MLP columns and the vocabulary are split over the ranks; norms are whole on each. Raises
    ModelLoadError naming a weight that is missing or misshapen, and for a model that is not
    supported (`support.py`).
    """
    check_supported(spec)
    return DecoderLoader(spec, source, ranks).decoder()


def load_stage(
    spec: DecoderSpec,
    source: WeightSource,
    stage: Stage,
    neighbours: Ranks,
    ranks: Ranks | None = None,
) -> StagedDecoder:
    """Read the layers of one pipeline stage; raises what `load_decoder` and `check_stages` do.

    `neighbours`: the ranks of all stages; `ranks`: those of this one, among which layers are split.
    """
    check_supported(spec)
    check_stages(spec, stage.size)
    run = find_run(spec, stage).layers
    return DecoderLoader(spec, source, ranks, run).stage(stage, neighbours)


class DecoderLoader(AttentionLoader):
    """Loads the parts of a decoder."""

    def __init__(
        self,
        spec: DecoderSpec,
        source: WeightSource,
        ranks: Ranks | None = None,
        run: range | None = None,
    ) -> None:
        """`run`: the layers that are loaded; None: all."""
        super().__init__(spec, source, ranks, run)
        self.ranks: Ranks | None = ranks
        # None: every layer learned its own.
        self.act = None if spec.names.activation else activation(spec.activation)
        # Blocks that several layers share, by the layer under which their weights are stored.
        self.blocks: dict[int, tuple[Attention, DenseMlp]] = {}

    def decoder(self) -> Decoder:
        spec, outer = self.spec, outer_refs(self.spec)
        embedding = self.weight(outer.embedding)
        layers = self.layers()
        head = self.head(embedding)
        head.pack()
        kind: Callable[..., Decoder] = Decoder
        if outer.gates is not None and spec.gated_streams is not None:
            gates = self.stream_gates(outer.gates, spec.gated_streams)
            gates.pack()
            kind = partial(GatedDecoder, gates=gates)
        return kind(
            spec,
            layers=layers,
            rotaries=self.turns(outer),
            embedding=embedding,
            positions=self.positions(outer),
            embedding_norm=self.optional_norm(outer.embedding_norm),
            final_norm=self.optional_norm(outer.final_norm),
            head=head,
            vocabulary=self.vocabulary(),
            ranks=self.ranks,
            per_layer_inputs=self.per_layer_inputs(outer.per_layer_inputs, spec.per_layer_inputs),
            streams=load_streams(self, outer.streams),
            hyper=load_hyper_ends(self, outer.hyper, spec.hyper),
            embedding_in=self.optional_linear(outer.embedding_in),
            embedding_out=self.optional_linear(outer.embedding_out),
        )

    def optional_linear(self, ref: LinearRef | None) -> Linear | None:
        """Return a packed linear, None if there is none."""
        if ref is None:
            return None
        linear = self.linear(ref)
        linear.pack()
        return linear

    def turns(self, outer: OuterRefs) -> list[Rotary]:
        """Return the rotary embeddings of all layers that have been loaded."""
        factors, ref = None, outer.rotary_factors
        if ref is not None:
            factors = self.tensor(ref, torch.float32).exp()
        return [Rotary(rotary, self.source.device, factors) for rotary in self.rotaries]

    def positions(self, outer: OuterRefs) -> torch.Tensor | None:
        """Return the table of positions [rows, hidden], learned or computed; None: there is none.

        It is on every rank.
        """
        spec = self.spec
        if outer.positions is not None:
            return self.weight(outer.positions)
        if not spec.sine_positions:
            return None
        table = torch.from_numpy(sine_positions(spec.position_rows, spec.hidden_size))
        return table.to(self.source.device, self.source.dtype)

    def vocabulary(self) -> slice:
        """Return the tokens whose rows of the embedding are on this rank."""
        return self.share(run_of("vocabulary", self.spec.vocab_size))

    def stage(self, stage: Stage, neighbours: Ranks) -> StagedDecoder:
        """Return the loader's run of layers as a stage, with embedding and head if it uses them."""
        spec, outer = self.spec, outer_refs(self.spec)
        first, last = stage.is_first, stage.is_last
        width = spec.embedding_width or spec.hidden_size
        none = torch.empty((0, width), dtype=self.source.dtype, device=self.source.device)
        wanted = first or (last and spec.tied_head)
        embedding = self.weight(outer.embedding) if wanted else none
        layers = self.layers()
        head = self.head(embedding) if last else Linear(embedding)
        if last:
            head.pack()
        return StagedDecoder(
            replace(spec, layers=tuple(spec.layers[index] for index in self.run)),
            layers=layers,
            rotaries=self.turns(outer),
            embedding=embedding,
            positions=self.positions(outer) if first else None,
            embedding_norm=self.optional_norm(outer.embedding_norm) if first else None,
            final_norm=self.optional_norm(outer.final_norm) if last else None,
            head=head,
            vocabulary=self.vocabulary(),
            ranks=self.ranks,
            stage=stage,
            neighbours=neighbours,
            embedding_in=self.optional_linear(outer.embedding_in) if first else None,
            embedding_out=self.optional_linear(outer.embedding_out) if last else None,
        )

    def layers(self) -> list[Layer]:
        """Return the loader's run of layers, packed."""
        layers = []
        for index in self.run:
            with self.source.giving_back():
                layer = self.spec.layers[index]
                layers.append(self.layer(index, layer, layer_refs(self.spec, index)))
                layers[-1].pack()
        return layers

    def per_layer_inputs(
        self, refs: PerLayerInputsRefs | None, spec: PerLayerInputsSpec | None
    ) -> PerLayerInputs | None:
        """Return what embeds tokens for each layer, None if layers have no such embeddings."""
        if refs is None or spec is None:
            return None
        projection = self.linear(refs.projection)
        projection.pack()
        return PerLayerInputs(
            spec,
            table=self.weight(refs.table),
            part=self.share(refs.table.pieces[0].outputs),
            projection=projection,
            norm=self.norm(refs.norm),
        )

    def head(self, embedding: torch.Tensor) -> Linear:
        """Return the head. A tied one is the embedding itself, unless linears are quantised while
        loading, or kernels multiply the head's codes as they are stored.
        """
        spec, ref = self.spec, outer_refs(self.spec).head
        if spec.normalised_head:
            whole = embedding if spec.tied_head else self.weight(ref)
            plain = functional.normalize(whole)
            return Linear(plain, self.bias(ref), invariant=self.source.invariant)
        coded = self.source.rounds or self.source.multiplies_codes(ref, self.share)
        if spec.tied_head and not coded:
            return Linear(embedding, self.bias(ref), invariant=self.source.invariant)
        return self.linear(ref)

    def layer(self, index: int, layer: LayerSpec, refs: LayerRefs) -> Layer:
        mixer = None
        if refs.mixer is not None and layer.mixer is not None:
            mixer = load_mixer(self, refs.mixer, layer.mixer, self.ranks)
        attention: Attention | None = None
        mlp: Mlp | None = None
        if refs.shared is not None and layer.shared is not None:
            attention, mlp = self.block(index, layer, layer.shared, refs, refs.shared)
        else:
            attention = self.attention(index, layer, refs.attention) if refs.attention else None
            mlp = self.mlp(refs.mlp, layer) if refs.mlp else None
        experts = None if layer.beside or layer.later else layer.experts
        result_scale = experts.result_scale if experts else 1.0
        loaded = Layer(
            attention=attention,
            mixer=mixer,
            mlp=mlp,
            attention_norm=self.optional_norm(refs.attention_norm),
            mlp_norm=self.optional_norm(refs.mlp_norm),
            attention_post_norm=self.optional_norm(refs.attention_post_norm),
            mlp_post_norm=self.optional_norm(refs.mlp_post_norm),
            mlp_scale=self.spec.mlp_scale * result_scale,
            mixer_scale=mixer_scale(layer.mixer),
            attention_sum_norm=self.optional_norm(refs.attention_sum_norm),
            mlp_sum_norm=self.optional_norm(refs.mlp_sum_norm),
            beside=self.beside(refs.beside, layer.experts),
            later=self.later(refs.later, layer.experts),
            per_layer_input=self.per_layer_input(refs.per_layer_input),
            streams=load_layer_streams(self, refs.streams, self.spec.streams),
            scale=self.source.vector(refs.scale.name, 1) if refs.scale else None,
            shared=self.shared_use(refs.shared),
            cross_attention=self.cross_attention(index, layer, refs.cross_attention),
            hyper=load_layer_hyper(self, refs.hyper, self.spec.hyper),
            gates=load_layer_gates(self, refs.gates, self.spec.gated_streams),
            ngrams=self.ngrams(refs.ngrams, layer),
            attention_norm_gate=self.norm_gate(refs.attention_norm_gate),
            mlp_norm_gate=self.norm_gate(refs.mlp_norm_gate),
        )
        loaded.join()
        return loaded

    def norm_gate(self, refs: NormGateRefs | None) -> NormGate | None:
        return None if refs is None else NormGate(self.linear(refs.down), self.linear(refs.up))

    def block(
        self,
        index: int,
        layer: LayerSpec,
        shared: SharedBlock,
        refs: LayerRefs,
        own: SharedRefs,
    ) -> tuple[Attention, DenseMlp]:
        """Return attention and MLP of a layer that uses a shared block, which is read only once."""
        counted = shared.layer not in self.blocks
        assert refs.attention is not None  # `layer_refs` reads the same spec
        if counted:
            assert isinstance(refs.mlp, MlpRefs)
            mlp = load_dense_mlp(self, refs.mlp, self.act)
            self.blocks[shared.layer] = self.attention(index, layer, refs.attention), mlp
        attention, mlp = self.blocks[shared.layer]
        changed = replace(
            attention,
            shape=self.attention_shape(index, layer, refs.attention),
            qkv=self.shared_linear(attention.qkv, own.qkv, counted=counted),
            output=self.shared_linear(attention.output, None, counted=counted),
        )
        return changed, DenseMlp(
            self.shared_linear(mlp.up, own.inner, counted=counted),
            self.shared_linear(mlp.down, None, counted=counted),
            mlp.act,
        )

    def shared_linear(
        self, base: Linear, refs: LowRankRefs | None, *, counted: bool
    ) -> SharedLinear:
        """Return a linear of a shared block, with a layer's low-rank addition."""
        down = self.linear(refs.down) if refs else None
        ups = [self.linear(up) for up in refs.ups] if refs else []
        return SharedLinear(base, down, ups, counted=counted)

    def shared_use(self, refs: SharedRefs | None) -> SharedUse | None:
        if refs is None:
            return None
        return SharedUse(self.linear(refs.exit), self.norm(refs.mixer_norm))

    def beside(self, refs: BesideRefs | None, spec: ExpertsSpec | None) -> ExpertsBeside | None:
        if refs is None or spec is None:
            return None
        with self.source.as_numbers():
            return load_beside(self, refs, spec, self.act)

    def later(self, refs: ExpertsRefs | None, spec: ExpertsSpec | None) -> ExpertsMlp | None:
        return None if refs is None or spec is None else self.experts(refs, spec)

    def per_layer_input(self, refs: PerLayerInputRefs | None) -> PerLayerInput | None:
        if refs is None:
            return None
        return PerLayerInput(
            gate=self.linear(refs.gate),
            act=activation(self.spec.activation),
            up=self.linear(refs.up),
            post_norm=self.norm(refs.post_norm),
        )

    def ngrams(self, refs: NgramsRefs | None, layer: LayerSpec) -> NgramsLayer | None:
        streams = self.spec.gated_streams
        if refs is None or layer.ngrams is None or streams is None:
            return None
        return load_ngrams(self, refs, layer.ngrams, streams.count, self.ranks)

    def mlp(self, refs: MlpRefs | ExpertsRefs, layer: LayerSpec) -> Mlp:
        if isinstance(refs, MlpRefs):
            act = self.act
            if layer.sparsity and act is not None:
                act = SparseActivation(act, layer.sparsity)
            limit, raised = self.spec.mlp_limit, self.spec.mlp_raised
            return load_dense_mlp(self, refs, act, limit, self.spec.gate_scale, raised=raised)
        assert layer.experts is not None  # `layer_refs` reads the same spec
        return self.experts(refs, layer.experts)

    def experts(self, refs: ExpertsRefs, spec: ExpertsSpec) -> ExpertsMlp:
        """Return experts; their codes are kept if kernels can multiply them in groups.

        Otherwise they are dequantised.
        """
        if self.source.multiplies_codes(refs.experts[0].down, self.share):
            experts = load_experts(self, refs, spec, self.act)
            if experts.group():
                return experts
        with self.source.as_numbers():
            return load_experts(self, refs, spec, self.act)
