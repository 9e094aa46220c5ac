"""From a model's spec and checkpoint to rows of the table of operations; a packer gets weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import Role, Site
from tgi_trio.model.decoder_matrices import layer_refs, outer_refs
from tgi_trio.model.matrices import (
    AttentionRefs,
    ExpertsRefs,
    LatentRefs,
    LayerRefs,
    LinearRef,
    MlpRefs,
    NormRef,
    every_unit,
)
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec, HeadSizes, LayerSpec
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.shard.checkpoint.lookup import Weights, read_linear, read_table
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.linear_biases import alibi_slopes
from tgi_trio.shard.numba_backend.adapted_operations import AdaptedSite
from tgi_trio.shard.numba_backend.head_order import head_order, needs_order
from tgi_trio.shard.numba_backend.latent_operations import LatentShape, add_queries, add_values
from tgi_trio.shard.numba_backend.mixer_operations import add_gates, add_mixer
from tgi_trio.shard.numba_backend.mixture_operations import Branch, add_mixture, pad_to_panel
from tgi_trio.shard.numba_backend.operation_writer import OperationWriter
from tgi_trio.shard.numba_backend.own_operations import add_own_input, add_own_inputs
from tgi_trio.shard.numba_backend.packing import Packer, to_storage
from tgi_trio.shard.numba_backend.tables import (
    ACTIVATIONS,
    Activation,
    Buffer,
    Code,
    Epilogue,
    Form,
)
from tgi_trio.shard.numba_backend.weight_layout import CacheNumbers
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The model's last norm, for who computes it beside the kernels."""

    weight: Array | None  # float32 [hidden]
    bias: Array | None
    eps: float
    centred: bool


@dataclass(frozen=True, slots=True)
class LoneLinear:
    """Operations that compute one linear layer of rows given from outside."""

    first: int  # rows of the table
    end: int
    inputs: int
    outputs: int
    width: int  # features of a result's row: whole panels
    wide: bool  # its input is float32, which the first operation makes whole numbers of


class ProgramBuilder:
    """Writes the operations of a model and of heads that guess for it; holds what they point to."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        packer: Packer,
        *,
        bf16: bool,
        as_stored: bool,
        heads: tuple[HeadsSpec, Weights] | None,
        kv: CacheNumbers | None = None,
    ) -> None:
        """Hand every weight to `packer`; raises ModelLoadError as the weights do. See `Program`."""
        self.writer = OperationWriter(weights, packer, as_stored=as_stored)
        self.lone: dict[str, LoneLinear] = {}
        self.sites: list[AdaptedSite] = []
        self._spec = spec
        self._bf16 = bf16
        self._kv_scales = kv.scales if kv else [(1.0, 1.0)] * len(spec.layers)
        self._index = 0  # of the layer whose operations are written
        self.layer_rows: list[int] = []  # the first operation of each
        self.qkv_width = 0  # features of the widest row of QKV
        self._build()
        self.end = len(self.writer.rows)  # of the model's own
        self.final_norm = self._read_final_norm()
        if heads is not None:
            self._add_heads(*heads)

    def _build(self) -> None:
        spec, outer = self._spec, outer_refs(self._spec)
        embedding = read_table(self.writer.source, outer.embedding, every_unit)
        scale = np.array([spec.embedding_scale], np.float32)
        if self._bf16:  # rounded to the dtype first, as Gemma was trained
            scale = to_float32(to_bfloat16(scale))
        packing = self.writer.packing(embedding.parts)
        if packing is None or packing.kind.floating or packing.order:
            table = self.writer.keep(to_storage(embedding.dequantised(), self._bf16))
        else:
            table = self.writer.pack_codes(embedding.parts, packing)
            self.writer.quantised.add(len(self.writer.rows), packing)
        self.writer.add(
            Code.EMBED,
            target=Buffer.HIDDEN,
            weights=table,
            inputs=spec.hidden_size,
            width=spec.hidden_size,
            scale=scale[0],
        )
        if outer.positions is not None:
            rows = read_table(self.writer.source, outer.positions, every_unit).dequantised()
            self.writer.add(
                Code.PLACE,
                target=Buffer.HIDDEN,
                weights=self.writer.keep(to_storage(rows, self._bf16)),
                width=spec.hidden_size,
                offset=spec.position_offset,
            )
        if outer.embedding_norm is not None:
            self._norm_rows(outer.embedding_norm, Buffer.HIDDEN, spec.hidden_size)
        if outer.own_inputs is not None and spec.own_inputs is not None:
            norm = self._norm_weight(outer.own_inputs.norm)
            add_own_inputs(
                self.writer, outer.own_inputs, spec.own_inputs, spec, norm, bf16=self._bf16
            )
        for index, layer in enumerate(spec.layers):
            self._index = index
            self.layer_rows.append(len(self.writer.rows))
            self._layer(layer_refs(spec, index), layer)
        self._norm(outer.final_norm, Buffer.HIDDEN, wanted_only=1)
        self.writer.linear(
            outer.head,
            Buffer.NORMED,
            Buffer.LOGITS,
            scale=spec.logit_scale,
            cap=spec.final_soft_cap,
            wanted_only=1,
        )

    def _read_final_norm(self) -> FinalNorm:
        norm = outer_refs(self._spec).final_norm
        if norm is None:
            raise ValueError("the kernels need a norm before the head; see `kernel_fit.py`")
        weight = self._norm_values(norm)
        bias = self.writer.source.vector(norm.bias, norm.size) if norm.bias else None
        return FinalNorm(weight, bias, norm.eps, self._centred)

    def _add_heads(self, heads: HeadsSpec, weights: Weights) -> None:
        """Add the linear layers of heads, and the model's head once more: for rows of theirs."""
        head = outer_refs(self._spec).head
        stored = self.writer.rows[self.end - 1]
        if self.writer.packing(read_linear(self.writer.source, head, every_unit).parts) is None:
            row = stored.copy()  # the same weights
            row["source"], row["target"], row["wanted_only"] = Buffer.LONE, Buffer.PRODUCT, 0
            self.writer.rows.append(row)
        else:
            self.writer.linear(head, Buffer.LONE, Buffer.PRODUCT)
        self._note_lone(MODEL_HEAD, self.end, self._spec.vocab_size)
        model, self.writer.source = self.writer.source, weights
        for role, ref in heads.linears.items():
            first = len(self.writer.rows)
            self.writer.linear(ref, Buffer.LONE, Buffer.PRODUCT)
            self._note_lone(role, first, sum(p.matrix.rows for p in ref.pieces))
        self.writer.source = model

    def _note_lone(self, role: str, first: int, outputs: int) -> None:
        rows = self.writer.rows[first:]
        self.lone[role] = LoneLinear(
            first=first,
            end=len(self.writer.rows),
            inputs=int(rows[0]["width" if rows[0]["code"] == Code.QUANTISE else "inputs"]),
            outputs=outputs,
            width=int(rows[-1]["width"]),
            wide=bool(rows[0]["code"] == Code.QUANTISE),
        )

    def _layer(self, refs: LayerRefs, layer: LayerSpec) -> None:
        if refs.mixer is not None and layer.mixer is not None:
            self._norm(refs.attention_norm, Buffer.HIDDEN)
            add_mixer(self.writer, refs.mixer, layer.mixer)
            self._branch(refs.mixer.output, Buffer.MIXED, refs.attention_post_norm)
        if refs.attention is not None:
            self._norm(refs.attention_norm, Buffer.HIDDEN)
            self._attention(refs, refs.attention, layer)
        if refs.mlp is not None and not self._spec.parallel:
            self._norm(refs.mlp_norm, Buffer.HIDDEN)
            self._mlp(refs, layer, len(self.writer.rows) - 1)
        self._leave(refs)

    def _leave(self, refs: LayerRefs) -> None:
        """Add what ends some layers: embeddings of their own, a scale."""
        spec = self._spec
        if refs.own_input is not None and spec.own_inputs is not None:
            add_own_input(self.writer, refs.own_input, spec.own_inputs, spec, self._index)
            self._join(refs.own_input.post_norm, 1.0)
        if refs.scale is not None:
            scale = self.writer.source.vector(refs.scale.name, 1)[0]
            self.writer.add(Code.SCALE, target=Buffer.HIDDEN, width=spec.hidden_size, scale=scale)

    def _attention(self, refs: LayerRefs, attention: AttentionRefs, layer: LayerSpec) -> None:
        """Add what follows the norm that was added last, with what is parallel to it."""
        feeder = len(self.writer.rows) - 1
        if attention.latent is not None and self._latents is not None:
            self._attend_latents(attention, attention.latent, layer, self._latents)
            self._branch(attention.output, Buffer.MIXED, refs.attention_post_norm)
            return
        self._adapt("qkv", attention.qkv, Buffer.NORMED)
        self.writer.linear(attention.qkv, Buffer.NORMED, Buffer.QKV, clip=self._spec.qkv_clip)
        if self._spec.parallel:  # what reads the norm comes first; nobody has added anything yet
            if refs.mlp_norm is not None:
                self._norm(refs.mlp_norm, Buffer.HIDDEN)
                feeder = len(self.writer.rows) - 1
            self._mlp(refs, layer, feeder)
        width = self._width_of(layer)
        self.qkv_width = max(self.qkv_width, width)
        self._attend(attention, layer, width)
        says = Buffer.ATTENDED
        if self._spec.gated_attention or self._spec.gated_heads:
            says = self._open_heads(self._spec.sizes(layer), width)
        self._adapt("output", attention.output, says)
        self._branch(attention.output, says, refs.attention_post_norm)

    def _attend_latents(
        self, refs: AttentionRefs, latent: LatentRefs, layer: LayerSpec, shape: LatentShape
    ) -> None:
        """Add attention over latents; no adapter changes anything of it."""
        scale, _ = self._kv_scales[self._index]  # values are keys
        add_queries(
            self.writer,
            refs,
            latent,
            shape,
            layer.rotary,
            bf16=self._bf16,
            norms={
                "query": self._norm_weight(latent.query_norm),
                "latent": self._norm_weight(latent.latent_norm),
            },
            scale=layer.scale * scale,
            key_scale=scale,
            value_scale=scale,
            **self._heads_of(layer),
        )
        self.qkv_width = max(self.qkv_width, shape.query_width)
        self.writer.add(
            Code.ATTEND,
            **self._heads_of(layer),
            window=layer.window,
            cap=self._spec.attention_soft_cap,
            value_scale=scale,
        )
        add_values(self.writer, latent, shape.spec, bf16=self._bf16)

    @property
    def _latents(self) -> LatentShape | None:
        """How K and V are compressed, if they are."""
        spec = self._spec
        return LatentShape(spec.latent, spec.heads) if spec.latent else None

    def _open_heads(self, sizes: HeadSizes, row: int) -> Buffer:
        """Add the gates of heads, which lie behind queries, keys and values in a `row` of so many;
        return the result's place.
        """
        spec = self._spec
        self.writer.rows[-1]["forms"] |= Form.WIDE
        width = spec.heads * sizes.value_dim
        add_gates(
            self.writer,
            Buffer.ATTENDED,
            inputs=width,
            width=width,
            gates=Buffer.QKV,
            gate_width=row,
            gate_place=spec.heads * sizes.dim + sizes.kv_heads * (sizes.dim + sizes.value_dim),
            gate_size=1 if spec.gated_attention else sizes.value_dim,
            group=sizes.value_dim,
            activation=Activation.SIGMOID,
        )
        return Buffer.MIXED

    def _width_of(self, layer: LayerSpec) -> int:
        """Return the features of a layer's row of QKV."""
        spec, sizes = self._spec, self._spec.sizes(layer)
        width = spec.heads * sizes.dim
        if layer.reads_layer is None:
            width += sizes.kv_heads * (sizes.dim + (0 if layer.keys_as_values else sizes.value_dim))
        if spec.gated_attention:
            return width + spec.heads * sizes.dim
        return width + pad_to_panel(spec.heads if spec.gated_heads else 0)

    def _heads_of(self, layer: LayerSpec) -> dict[str, int]:
        """Return what operations are told of a layer's heads."""
        sizes = self._spec.sizes(layer)
        return {"kv_heads": sizes.kv_heads, "head_dim": sizes.dim, "value_dim": sizes.value_dim}

    def _scales_of(self, layer: LayerSpec) -> tuple[float, float]:
        """Return what 1 stands for in the K and V that a layer reads."""
        return self._kv_scales[self._index if layer.reads_layer is None else layer.reads_layer]

    def _attend(self, refs: AttentionRefs, layer: LayerSpec, width: int) -> None:
        spec, slopes, sinks = self._spec, 0, 0
        self._rotate(refs, layer, width)
        if spec.alibi:
            found = alibi_slopes(spec.heads) * np.float32(spec.alibi_scale)
            slopes = self.writer.keep(found)
        if refs.sinks is not None:
            sinks = self.writer.keep(self.writer.source.vector(refs.sinks.name, refs.sinks.size))
        self.writer.add(
            Code.ATTEND,
            **self._heads_of(layer),
            window=layer.window,
            cap=spec.attention_soft_cap,
            value_scale=self._scales_of(layer)[1],
            causal=not layer.ahead,
            slopes=slopes,
            sinks=sinks,
        )

    def _mlp(self, refs: LayerRefs, layer: LayerSpec, feeder: int) -> None:
        """Add what follows the norm in row `feeder`."""
        if isinstance(refs.mlp, MlpRefs):
            self._dense(refs.mlp, refs.mlp_post_norm, feeder)
        elif refs.mlp is not None and layer.experts is not None:
            self._mixture(refs.mlp, layer.experts, refs.mlp_post_norm, feeder)

    def _dense(self, mlp: MlpRefs, post_norm: NormRef | None, feeder: int) -> None:
        self._adapt("inner", mlp.inner, Buffer.NORMED, paired=mlp.gated, feeder=feeder)
        self.writer.linear(
            mlp.inner,
            Buffer.NORMED,
            Buffer.INNER,
            paired=mlp.gated,
            feeder=feeder,
            width=mlp.down.pieces[0].matrix.columns,
            epilogue=Epilogue.GATE if mlp.gated else Epilogue.ACTIVATE,
            activation=ACTIVATIONS[self._spec.activation],
            learned=self._learned(mlp),
        )
        self._adapt("down", mlp.down, Buffer.INNER)
        self._branch(mlp.down, Buffer.INNER, post_norm)

    def _learned(self, mlp: MlpRefs) -> int:
        """Keep the numbers of xIELU as kernels read them; return their address, 0 for none."""
        if not mlp.learned:
            return 0
        stored = [self.writer.source.vector(ref.name, ref.size)[0] for ref in mlp.learned]
        alpha_p, alpha_n, beta, eps = (np.float32(value) for value in stored)
        positive, negative = np.logaddexp(np.float32(0.0), (alpha_p, alpha_n))
        return self.writer.keep(np.array([positive, beta + negative, beta, eps], np.float32))

    def _mixture(
        self, refs: ExpertsRefs, experts: ExpertsSpec, post_norm: NormRef | None, feeder: int
    ) -> None:
        spec = self._spec
        target, scale = Buffer.HIDDEN, spec.residual_scale
        if post_norm is not None:
            target, scale = Buffer.BRANCH, 1.0
        branch = Branch(target, scale, spec.activation, spec.hidden_size)
        add_mixture(self.writer, refs, experts, branch, feeder)
        if post_norm is not None:
            self._join(post_norm, spec.residual_scale)

    def _adapt(
        self,
        role: Role,
        linear: LinearRef,
        source: Buffer,
        *,
        paired: bool = False,
        feeder: int | None = None,
    ) -> None:
        """Take note that adapters may change the linear layer whose operations come next."""
        inputs = linear.pieces[0].matrix.columns
        outputs = sum(piece.outputs.size * len(piece.outputs.starts) for piece in linear.pieces)
        row, site = len(self.writer.rows), Site(self._index, role)
        before = row - 1 if feeder is None else feeder
        self.sites.append(AdaptedSite(site, row, source, inputs, outputs, paired, before))

    def _rotate(self, refs: AttentionRefs, layer: LayerSpec, width: int) -> None:
        spec, order, own = self._spec, None, self._heads_of(layer)
        heads = (refs.query_norm, 0), (refs.key_norm, spec.heads * own["head_dim"])
        if spec.query_key_norm == "whole":
            for norm, offset in heads:
                if norm is not None:
                    self._norm_rows(norm, Buffer.QKV, width, offset)
            heads = (None, 0), (None, 0)
        if layer.rotary is not None and needs_order(layer.rotary):
            order = head_order(layer.rotary, own["head_dim"])
            self.writer.add(Code.REORDER, order=self.writer.keep(order), width=width, **own)
        query, key = (self._norm_weight(norm, order) for norm, _ in heads)
        scale, value = self._scales_of(layer)
        self.writer.add(
            Code.ROTATE,
            width=width,
            eps=spec.norm_eps,
            query_norm=query,
            key_norm=key,
            norm_last=spec.norm_after_rotary,
            scale=layer.scale * scale,
            key_scale=scale,
            value_scale=value,
            reads_only=layer.reads_layer is not None,
            keys_as_values=layer.keys_as_values,
            value_norm=spec.value_norm,
            value_factor=spec.value_scale,
            **own,
        )

    def _norm_rows(self, ref: NormRef, target: Buffer, width: int, offset: int = 0) -> None:
        """Norm part of every row of a buffer, in place."""
        bias = self.writer.source.vector(ref.bias, ref.size) if ref.bias else None
        self.writer.add(
            Code.NORM_ROWS,
            target=target,
            width=width,
            offset=offset,
            inputs=ref.size,
            weights=self._norm_weight(ref),
            bias=self.writer.keep(bias),
            centred=self._centred,
            eps=ref.eps,
        )

    def _branch(self, linear: LinearRef, source: Buffer, post_norm: NormRef | None) -> None:
        """End a branch: it joins the residual stream, through a norm of its own if it has one."""
        if post_norm is None:
            scale = self._spec.residual_scale
            self.writer.linear(linear, source, Buffer.HIDDEN, epilogue=Epilogue.ADD, scale=scale)
            return
        self.writer.linear(linear, source, Buffer.BRANCH)
        self._join(post_norm, self._spec.residual_scale)

    def _join(self, post_norm: NormRef, scale: float) -> None:
        """Add a branch to the residual stream through its norm."""
        self._norm(
            post_norm, Buffer.BRANCH, target=Buffer.HIDDEN, epilogue=Epilogue.ADD, scale=scale
        )

    @property
    def _centred(self) -> bool:
        """Whether norms take the mean away."""
        return self._spec.norm in ("layer", "layer_plus_one")

    def _norm(self, ref: NormRef | None, source: Buffer, **fields: Any) -> None:
        if ref is None:
            self.writer.add(
                Code.PASS_ON,
                source=source,
                target=Buffer.NORMED,
                inputs=self._spec.hidden_size,
                span=self._spec.hidden_size,
            )
            return
        bias = self.writer.source.vector(ref.bias, ref.size) if ref.bias else None
        defaults = {"target": Buffer.NORMED, "epilogue": Epilogue.PASS, "scale": 1.0}
        self.writer.add(
            Code.NORM,
            source=source,
            inputs=ref.size,
            weights=self._norm_weight(ref),
            bias=self.writer.keep(bias),
            centred=self._centred,
            eps=ref.eps,
            **(defaults | fields),
        )

    def _norm_weight(self, ref: NormRef | None, order: Array | None = None) -> int:
        """Keep a norm's weight, in an `order` if there is one; return its address, 0 for none."""
        values = None if ref is None else self._norm_values(ref)
        return self.writer.keep(values if values is None or order is None else values[order])

    def _norm_values(self, ref: NormRef) -> Array | None:
        if not ref.weight:
            return None
        weight = self.writer.source.vector(ref.weight, ref.size)
        return weight + np.float32(1.0) if self._spec.norm.endswith("plus_one") else weight
