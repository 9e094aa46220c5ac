"""Builds the table of operations from a model's spec and checkpoint, and packs the weights."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import AdapterScope, adapts_head, head_site
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, NormRef
from tgi_trio.model.matrices.roles import (
    AttentionRefs,
    ExpertsRefs,
    GatesRefs,
    HyperRefs,
    LayerRefs,
    MlpRefs,
    NgramsRefs,
    NormGateRefs,
)
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LayerSpec
from tgi_trio.model.specs.mixers import Mamba2
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.model.split import Portion
from tgi_trio.model.stages import Run
from tgi_trio.shard.checkpoint.lookup import Weights
from tgi_trio.shard.cpu_backend.operations.activations import keep_learned
from tgi_trio.shard.cpu_backend.operations.adapted_sites import SiteRecorder
from tgi_trio.shard.cpu_backend.operations.attention import AttentionWriter
from tgi_trio.shard.cpu_backend.operations.beside import add_beside
from tgi_trio.shard.cpu_backend.operations.embedding import add_embedding
from tgi_trio.shard.cpu_backend.operations.gated import GatesWriter
from tgi_trio.shard.cpu_backend.operations.hyper import HyperWriter
from tgi_trio.shard.cpu_backend.operations.lone_linears import LoneLinear, add_lone_linears
from tgi_trio.shard.cpu_backend.operations.mixers import add_mixer
from tgi_trio.shard.cpu_backend.operations.mixtures import Branch, add_mixture
from tgi_trio.shard.cpu_backend.operations.ngrams import add_ngrams
from tgi_trio.shard.cpu_backend.operations.norm_gates import add_norm_gate
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.per_layer_inputs import add_per_layer_input
from tgi_trio.shard.cpu_backend.operations.shared_blocks import SharedWriter
from tgi_trio.shard.cpu_backend.operations.streams import StreamWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.packing import Packer
from tgi_trio.shard.cpu_backend.tables import ACTIVATIONS, Buffer, Code, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The model's last norm, for code that computes it outside the kernels."""

    weight: Array | None  # float32 [hidden]
    bias: Array | None
    eps: float
    centred: bool


class ProgramBuilder:
    """Writes the operations of a model and its speculation heads; holds what they point to."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        packer: Packer,
        *,
        bf16: bool,
        as_stored: bool,
        turns: bool,
        int8_by_rows: bool,
        heads: tuple[HeadsSpec, Weights] | None,
        kv: CacheNumbers | None = None,
        scope: AdapterScope,
        run: Run,
        portion: Portion,
    ) -> None:
        """Hand every weight of `run`, or its `portion`, to `packer`; see `Program`.

        Raises ModelLoadError as the weights do.
        """
        self.writer = OperationWriter(
            weights,
            packer,
            as_stored=as_stored,
            turns=turns,
            int8_by_rows=int8_by_rows,
            portion=portion,
        )
        self._model, spec = spec, portion.sizes_of(spec)
        self.lone: dict[str, LoneLinear] = {}
        self.sites = SiteRecorder(self.writer, scope)
        self._spec = spec
        self._run = run
        self._bf16 = bf16
        self._norms = NormWriter(self.writer, spec)
        kv_scales = kv.scales if kv else [(1.0, 1.0)] * len(spec.layers)
        self._heads = AttentionWriter(self.writer, self._norms, spec, kv_scales, bf16=bf16)
        self._streams: StreamWriter | None = None
        if spec.streams is not None:
            self._streams = StreamWriter(self.writer, self._norms, spec, spec.streams)
        self._hyper: HyperWriter | None = None
        if spec.hyper is not None:
            self._hyper = HyperWriter(self.writer, spec, spec.hyper)
        self._gates: GatesWriter | None = None
        if spec.gated_streams is not None:
            self._gates = GatesWriter(self.writer, self._norms, spec, spec.gated_streams)
        self._blocks = SharedWriter(self.writer, self._norms, self._heads, spec)
        self.rotary_factors: Array | None = None  # of learned frequencies, float32 [pairs]
        # As numbers [vocabulary, features]; None: it is kept as codes, or not on this rank.
        self.embedding: NDArray[Any] | None = None
        self._index = 0  # of the layer whose operations are written
        self.layer_rows: list[int] = []  # the first operation of each
        self._build()
        self.body = len(self.writer.rows)
        if run.is_last:
            self._add_head()
        self.end = len(self.writer.rows)  # of the model itself
        self.final_norm = self._read_final_norm()
        if heads is not None:
            head = outer_refs(self._model).head
            self.lone = add_lone_linears(self.writer, spec, head, *heads)

    @property
    def _several(self) -> bool:
        """Whether what parts say is added to several hidden states."""
        return self._hyper is not None or self._gates is not None

    @property
    def qkv_width(self) -> int:
        """Features of the widest row of QKV."""
        return self._heads.qkv_width

    def _build(self) -> None:
        """Add everything up to the last hidden states."""
        spec, outer = self._spec, outer_refs(self._model)
        if (ref := outer.rotary_factors) is not None:
            self.rotary_factors = np.exp(self.writer.source.array(ref.name, ref.shape))
        if self._run.is_first:
            self.embedding = add_embedding(self.writer, self._norms, spec, outer, bf16=self._bf16)
        if self._streams is not None and outer.streams is not None:
            self._streams.split(outer.streams)
        if self._hyper is not None:
            self._hyper.fork()
        if self._gates is not None and self._run.is_first:
            self._gates.repeat()
        if any(layer.shared for layer in spec.layers):
            self._blocks.keep_first()
        for index in self._run.layers:
            self._index = self.sites.layer = index
            self.layer_rows.append(len(self.writer.rows))
            self._layer(layer_refs(self._model, index), spec.layers[index])
        if self._streams is not None and outer.streams is not None:
            self._streams.merge(outer.streams)
        self._gather(outer.hyper)
        if self._hyper is not None and outer.hyper is None:
            self._hyper.join()
        if self._gates is not None and outer.gates is not None:
            self._gates.read(outer.gates, last=True)

    def _add_head(self) -> None:
        """Add the final norm and the head, for the wanted tokens."""
        spec, outer = self._spec, outer_refs(self._model)
        if self._gates is not None:
            self._gates.pick()
        else:
            self._norms.add(outer.final_norm, Buffer.HIDDEN, wanted_only=1)
        if outer.embedding_out is not None:
            self.writer.linear(outer.embedding_out, Buffer.NORMED, Buffer.BRANCH, wanted_only=1)
            self._norms.pass_on(Buffer.BRANCH, spec.embedding_width)
        if adapts_head(self._model):
            self.sites.layer = head_site(self._model).layer
            self.sites.add("head", outer.head, Buffer.NORMED)
        self.writer.linear(
            outer.head,
            Buffer.NORMED,
            Buffer.LOGITS,
            scale=spec.logit_scale,
            cap=spec.final_soft_cap,
            wanted_only=1,
            normalised=spec.normalised_head,
        )

    def _read_final_norm(self) -> FinalNorm | None:
        norm = outer_refs(self._model).final_norm
        if norm is None:  # gates are before the head; see `fit/cpu_kernels.py`
            return None
        weight, bias = self._norms.read_weight(norm), self._norms.read_bias(norm)
        return FinalNorm(weight, bias, norm.eps, self._norms.is_centred(norm))

    def _layer(self, refs: LayerRefs, layer: LayerSpec) -> None:
        if refs.shared is not None:
            self._blocks.use(self._index, refs, layer)
            self._mixer(refs, layer, len(self.writer.rows) - 1)
            return
        if self._gates is not None and refs.ngrams is not None:
            self._add_ngrams(self._gates, refs.ngrams, layer)
        if refs.attention is None:
            self._mixer(refs, layer, None)
        if self._streams is not None and refs.streams is not None:
            self._streams.predict(refs.streams)
        if refs.attention is not None:
            self._gather(refs.hyper.attention if refs.hyper else None)
            self._read(refs.attention_norm, refs.gates.attention if refs.gates else None)
            self._gate_norm(refs.attention_norm_gate)
            self._attention(refs, refs.attention, layer)
        self._settle(refs.attention_sum_norm)
        if refs.mlp is not None and not self._spec.parallel:
            self._gather(refs.hyper.mlp if refs.hyper else None)
            self._read(refs.mlp_norm, refs.gates.mlp if refs.gates else None)
            self._gate_norm(refs.mlp_norm_gate)
            self._mlp(refs, layer, len(self.writer.rows) - 1)
        self._settle(refs.mlp_sum_norm)
        self._leave(refs)

    def _read(self, norm: NormRef | None, gates: GatesRefs | None) -> None:
        """Add the norm of what a part reads, or what gates let it read of several hidden states."""
        if self._gates is not None and gates is not None:
            self._gates.read(gates)
        else:
            self._norms.add(norm, Buffer.HIDDEN)

    def _add_ngrams(self, gates: GatesWriter, refs: NgramsRefs, layer: LayerSpec) -> None:
        """Add n-grams to all hidden states, to which everything before has been added."""
        gates.settle()
        if layer.ngrams is not None:
            size = self._spec.hidden_size
            add_ngrams(self.writer, self._norms, refs, layer.ngrams, size, bf16=self._bf16)

    def _gather(self, refs: HyperRefs | None) -> None:
        """Add what is read of several hidden states, if a token has them."""
        if self._hyper is not None and refs is not None:
            self._hyper.gather(refs)

    def _join(self, norm: NormRef | None, scale: float) -> None:
        """Add what is in BRANCH to the residual stream, or to all hidden states."""
        if self._gates is not None:
            self._gates.hold(scale)
        elif self._hyper is not None:
            self._hyper.scatter(scale)
        elif norm is not None:
            self._norms.join(norm, scale)

    def _gate_norm(self, gate: NormGateRefs | None) -> None:
        if gate is not None:
            add_norm_gate(self.writer, gate, self._spec.hidden_size)

    def _settle(self, norm: NormRef | None) -> None:
        """Add a norm of the residual stream, in whose place its result is, if there is one."""
        if norm is not None:
            self._norms.add_in_place(norm, Buffer.HIDDEN, self._spec.hidden_size)

    def _mixer(self, refs: LayerRefs, layer: LayerSpec, feeder: int | None) -> None:
        """Add the mixer with a recurrent state, if there is one; `feeder` None: with its norm."""
        mixer = layer.mixer
        if refs.mixer is None or mixer is None:
            return
        if feeder is None:
            self._gather(refs.hyper.attention if refs.hyper else None)
            self._read(refs.attention_norm, refs.gates.attention if refs.gates else None)
            feeder = len(self.writer.rows) - 1
        scale = mixer.output_multiplier if isinstance(mixer, Mamba2) else 1.0
        add_mixer(self.writer, refs.mixer, mixer, feeder)
        self._branch(refs.mixer.output, Buffer.MIXED, refs.attention_post_norm, scale)

    def _leave(self, refs: LayerRefs) -> None:
        """Add the ends of some layers: their own embeddings, a scale."""
        spec = self._spec
        if self._streams is not None and refs.streams is not None:
            self._streams.correct(refs.streams)
        if refs.per_layer_input is not None and spec.per_layer_inputs is not None:
            add_per_layer_input(
                self.writer, refs.per_layer_input, spec.per_layer_inputs, spec, self._index
            )
            if self._streams is not None:
                self._streams.spread(refs.per_layer_input.post_norm)
            else:
                self._norms.join(refs.per_layer_input.post_norm, 1.0)
        if refs.scale is not None:
            scale = self.writer.source.vector(refs.scale.name, 1)[0]
            self.writer.add(Code.SCALE, target=Buffer.HIDDEN, width=spec.hidden_size, scale=scale)

    def _attention(self, refs: LayerRefs, attention: AttentionRefs, layer: LayerSpec) -> None:
        """Add everything after the norm that was added last, with what is parallel to it."""
        feeder = len(self.writer.rows) - 1
        if attention.latent is not None:
            says = self._heads.attend_latents(
                self._index, attention, attention.latent, layer, self.sites
            )
            self.sites.add("output", attention.output, says)
            self._branch(attention.output, says, refs.attention_post_norm)
            return
        self.sites.add("qkv", attention.qkv, Buffer.NORMED)
        row = self._heads.row_of(layer)
        self.writer.linear(
            attention.qkv, Buffer.NORMED, Buffer.QKV, clip=self._spec.qkv_clip, **row
        )
        # what reads the norm comes first; nothing has been added to the stream yet
        if self._spec.parallel:
            if refs.mlp_norm is not None:
                self._norms.add(refs.mlp_norm, Buffer.HIDDEN)
                feeder = len(self.writer.rows) - 1
            self._mlp(refs, layer, feeder)
        if self._streams is not None and refs.streams is not None:
            self._streams.detour(refs.streams, refs.attention_norm, feeder)
        self._mixer(refs, layer, feeder)  # in parallel with attention, through the same norm
        says = self._heads.attend(self._index, attention, layer)
        self.sites.add("output", attention.output, says)
        scale = self._spec.attention_scale
        self._branch(attention.output, says, refs.attention_post_norm, scale)
        if self._streams is not None:
            self._streams.end_attention()

    def _mlp(self, refs: LayerRefs, layer: LayerSpec, feeder: int) -> None:
        """Add everything after the norm in row `feeder`."""
        if isinstance(refs.mlp, MlpRefs):
            post_norm = refs.mlp_post_norm
            inner = self._dense(refs.mlp, layer, feeder)
            if refs.beside is not None and layer.experts is not None and post_norm is not None:
                add_beside(
                    self.writer,
                    self._norms,
                    self._spec,
                    refs.mlp.down,
                    refs.beside,
                    layer.experts,
                    post_norm,
                    self.sites,
                )
            else:
                self._branch(refs.mlp.down, inner, post_norm, self._spec.mlp_scale)
        elif refs.mlp is not None and layer.experts is not None:
            self._mixture(refs.mlp, layer.experts, refs.mlp_post_norm, feeder)

    def _dense(self, mlp: MlpRefs, layer: LayerSpec, feeder: int) -> Buffer:
        """Add an MLP up to the input of its last linear layer; return the buffer of that."""
        width = next(mlp.down.cuts(self.writer.portion.share)).width
        if layer.sparsity:  # whose bound depends on all gates
            self.sites.add("inner", mlp.inner, Buffer.NORMED, feeder=feeder)
            self.writer.linear(mlp.inner, Buffer.NORMED, Buffer.PROJECTED, feeder=feeder)
            self.writer.add(
                Code.CUT,
                source=Buffer.PROJECTED,
                target=Buffer.INNER,
                width=width,
                scale=NormalDist().inv_cdf(layer.sparsity),
                activation=ACTIVATIONS[self._spec.activation],
                learned=keep_learned(self.writer, mlp),
            )
            self.sites.add("down", mlp.down, Buffer.INNER)
            return Buffer.INNER
        self.sites.add("inner", mlp.inner, Buffer.NORMED, paired=mlp.gated, feeder=feeder)
        self.writer.linear(
            mlp.inner,
            Buffer.NORMED,
            Buffer.INNER,
            paired=mlp.gated,
            feeder=feeder,
            width=width,
            epilogue=Epilogue.GATE if mlp.gated else Epilogue.ACTIVATE,
            scale=self._spec.gate_scale,
            activation=ACTIVATIONS[self._spec.activation],
            learned=keep_learned(self.writer, mlp),
            clip=self._spec.mlp_limit,
            raised=self._spec.mlp_raised,
        )
        inner = Buffer.INNER
        if mlp.inner_norm is not None:
            inner = self._norms.add_inner(mlp.inner_norm, inner)
        self.sites.add("down", mlp.down, inner)
        return inner

    def _mixture(
        self, refs: ExpertsRefs, experts: ExpertsSpec, post_norm: NormRef | None, feeder: int
    ) -> None:
        spec = self._spec
        scale = spec.residual_scale * spec.mlp_scale * experts.result_scale
        branch = Branch(Buffer.HIDDEN, scale, spec.activation, spec.hidden_size)
        if post_norm is not None or self._several:
            branch = Branch(Buffer.BRANCH, 1.0, spec.activation, spec.hidden_size)
        add_mixture(self.writer, refs, experts, branch, feeder, self.sites)
        self._join(post_norm, scale)

    def _branch(
        self, linear: LinearRef, source: Buffer, post_norm: NormRef | None, scale: float = 1.0
    ) -> None:
        """End a branch: it joins the residual stream, through its own norm if it has one."""
        scale *= self._spec.residual_scale
        if post_norm is None and not self._several:
            self.writer.linear(linear, source, Buffer.HIDDEN, epilogue=Epilogue.ADD, scale=scale)
            return
        self.writer.linear(linear, source, Buffer.BRANCH)
        self._join(post_norm, scale)
