"""The operations of attention, from projected queries, keys and values to heads' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.decoder import normalises_plainly
from tgi_trio.model.matrices.roles import AttentionRefs, LatentRefs
from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes, IndexSpec, LayerSpec
from tgi_trio.shard.cpu_backend.head_order import head_order, needs_order
from tgi_trio.shard.cpu_backend.operations.adapted_sites import SiteRecorder
from tgi_trio.shard.cpu_backend.operations.blocks import add_block_choice
from tgi_trio.shard.cpu_backend.operations.gates import add_gates
from tgi_trio.shard.cpu_backend.operations.index import add_choice, keep_log_scales
from tgi_trio.shard.cpu_backend.operations.latents import LatentShape, add_queries, add_values
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.padded_heads import (
    add_padding,
    close_heads,
    is_padded,
    kept_sizes,
    pad_gain,
)
from tgi_trio.shard.cpu_backend.operations.pooled import add_pooled_choice, add_run_choice
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import GATES, Buffer, Code, Form
from tgi_trio.shard.positions.linear_biases import alibi_slopes

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class AttentionWriter:
    """Writes the operations between the two linear layers of attention.

    `kv_scales`: the scales of 8-bit K and V in each layer. Methods raise ModelLoadError as the
    weights do.
    """

    def __init__(
        self,
        writer: OperationWriter,
        norms: NormWriter,
        spec: DecoderSpec,
        kv_scales: Sequence[tuple[float, float]],
        *,
        bf16: bool,
    ) -> None:
        self.qkv_width = 0  # features of the widest row of QKV
        # Of the last choice of runs, which further layers go on with.
        self._choice: dict[str, Any] = {}
        self._writer = writer
        self._norms = norms
        self._spec = spec
        self._kv_scales = kv_scales
        self._bf16 = bf16

    def attend(self, index: int, refs: AttentionRefs, layer: LayerSpec) -> Buffer:
        """Add the attention of layer number `index` over QKV; return the buffer of the result."""
        width = self._width_of(layer)
        self.qkv_width = max(self.qkv_width, width)
        self._attend(index, refs, layer, width)
        if self._spec.gated_attention or self._spec.gated_heads:
            return self._open_heads(self._spec.sizes(layer), width)
        if is_padded(self._spec, layer):
            return close_heads(self._writer, self._spec, layer)
        if refs.inner_norm is not None:
            return self._norms.add_inner(refs.inner_norm, Buffer.ATTENDED)
        return Buffer.ATTENDED

    def row_of(self, layer: LayerSpec) -> dict[str, Any]:
        """Return the fields for the first linear layer's result rows, which may be padded."""
        return {"width": self._width_of(layer)} if is_padded(self._spec, layer) else {}

    def attend_latents(
        self,
        index: int,
        refs: AttentionRefs,
        latent: LatentRefs,
        layer: LayerSpec,
        sites: SiteRecorder,
    ) -> Buffer:
        """Add latent attention, with its first linear layer; return the buffer of the result."""
        spec, own, before = self._spec, self._spec.index_of(layer), len(self._writer.rows) - 1
        reads = layer.reads_layer
        compressed, chooser = spec.latent_of(layer), own if layer.chooses else None
        if compressed is None:
            raise ValueError(f"layer {index} has the weights of latents, and the model has none")
        shape = LatentShape.of(spec, compressed, chooser, reads_only=reads is not None)
        scale, _ = self._kv_scales[index if reads is None else reads]  # values are keys

        add_queries(
            self._writer,
            refs,
            latent,
            shape,
            layer.rotary,
            sites,
            bf16=self._bf16,
            norms={
                "query": self._norms.keep_weight(latent.query_norm),
                "latent": self._norms.keep_weight(latent.latent_norm),
            },
            scale=layer.scale * scale,
            key_scale=scale,
            value_scale=scale,
            choose=partial(self._add_choice, refs, shape, before, scale),
            reads_only=reads is not None,
            log_scales=keep_log_scales(self._writer, refs.query_scale),
            **self._heads_of(layer),
        )
        opened = shape.values_width if shape.gates or shape.late_gates else 0
        self.qkv_width = max(self.qkv_width, shape.query_width, opened)
        add_values(
            self._writer,
            latent,
            shape,
            sites,
            bf16=self._bf16,
            activation=GATES[self._spec.gate_activation],
            attending=self._attend_latents(refs, layer, own, scale),
        )
        return Buffer.MIXED

    def _attend_latents(
        self, refs: AttentionRefs, layer: LayerSpec, index: IndexSpec | None, scale: float
    ) -> int:
        """Add attention to latents, whose values have this scale; return how many operations."""
        attending = [Code.ATTEND]
        fields = {
            **self._heads_of(layer),
            "window": layer.window,
            "cap": self._spec.attention_soft_cap,
            "value_scale": scale,
            "most": 0 if index is None else index.most,
            "sinks": self._keep_sinks(refs),
        }
        if index is not None:
            attending.append(Code.ATTEND_POOLED if index.pool else Code.ATTEND_CHOSEN)
            fields |= self._choice if index.pool else {}
        for code in attending:
            self._writer.add(code, **fields)
        return len(attending)

    def _add_choice(
        self, refs: AttentionRefs, shape: LatentShape, before: int, scale: float, feeder: int
    ) -> None:
        """Add the choice of a layer's own index, if it has one, by its `feeder`; see `add_queries`.

        `before`: the row of the layer's norm; `scale`: of keys.
        """
        if refs.index is None or shape.index is None:
            return
        if refs.index.query_norm is not None:  # of what the layer reads
            self._writer.rows[before]["forms"] |= Form.WIDE
            self._norms.add(refs.index.query_norm, Buffer.UNSORTED, target=Buffer.MIXED)
            feeder = len(self._writer.rows) - 1
        norm = refs.index.key_norm
        own: dict[str, Any] = {"place": shape.index_place, "width": shape.projected_width}
        own["key_norm"] = self._norms.read_weight(norm), self._norms.read_bias(norm)
        own |= {"key_scale": scale, "feeder": feeder}
        if shape.index.pool:
            width, self._choice = add_run_choice(self._writer, refs.index, shape.index, **own)
        else:
            width = add_choice(self._writer, refs.index, shape.index, **own)
        self.qkv_width = max(self.qkv_width, width)

    def _open_heads(self, sizes: HeadSizes, row: int) -> Buffer:
        """Add the gates of heads, which follow queries, keys and values in a `row` of QKV; return
        the buffer of the result.
        """
        spec = self._spec
        self._writer.rows[-1]["forms"] |= Form.WIDE
        width = sizes.heads * sizes.value_dim
        add_gates(
            self._writer,
            Buffer.ATTENDED,
            inputs=width,
            width=width,
            gates=Buffer.QKV,
            gate_width=row,
            gate_place=sizes.heads * sizes.dim + sizes.kv_heads * (sizes.dim + sizes.value_dim),
            gate_size=1 if spec.gated_attention else sizes.value_dim,
            group=sizes.value_dim,
            activation=GATES[spec.gate_activation],
        )
        return Buffer.MIXED

    def _width_of(self, layer: LayerSpec) -> int:
        """Return the number of features in a layer's row of QKV."""
        spec, sizes = self._spec, kept_sizes(self._spec, layer)
        width = sizes.heads * sizes.dim
        if layer.reads_layer is None:
            width += sizes.kv_heads * (sizes.dim + (0 if layer.keys_as_values else sizes.value_dim))
        if spec.gated_attention:
            width += sizes.heads * sizes.dim
        width += pad_to_panel(sizes.heads if spec.gated_heads else 0)
        return width + _count_index_features(layer, sizes)

    def _heads_of(self, layer: LayerSpec) -> dict[str, int]:
        """Return the fields of operations that describe a layer's heads."""
        sizes = kept_sizes(self._spec, layer)
        return {
            "heads": sizes.heads,
            "kv_heads": sizes.kv_heads,
            "head_dim": sizes.dim,
            "value_dim": sizes.value_dim,
        }

    def _attend(self, index: int, refs: AttentionRefs, layer: LayerSpec, width: int) -> None:
        spec, slopes = self._spec, 0
        # The scales of the K and V that the layer reads.
        scales = self._kv_scales[index if layer.reads_layer is None else layer.reads_layer]
        self._rotate(refs, layer, width, scales)
        if spec.alibi:
            found = alibi_slopes(spec.heads) * np.float32(spec.alibi_scale)
            slopes = self._writer.keep(found)
        fields: dict[str, Any] = {
            **self._heads_of(layer),
            "cap": spec.attention_soft_cap,
            "value_scale": scales[1],
            "causal": not layer.ahead,
            "slopes": slopes,
            "sinks": self._keep_sinks(refs),
        }
        choice = self._choose_blocks(refs, layer, width, scales[0])
        most = choice.get("most", 0)
        self._writer.add(Code.ATTEND, window=layer.window, chunk=layer.chunk, most=most, **fields)
        if choice:
            code = Code.ATTEND_BLOCKS if layer.pooled is None else Code.ATTEND_POOLED
            self._writer.add(code, **fields, **choice)

    def _choose_blocks(
        self, refs: AttentionRefs, layer: LayerSpec, width: int, key_scale: float
    ) -> dict[str, Any]:
        """Add the choice of blocks, if a layer has an index of these; see `add_block_choice`."""
        sizes, norms = self._spec.sizes(layer), refs.blocks
        own: dict[str, Any] = {"width": width, "key_scale": key_scale}
        own["place"] = width - _count_index_features(layer, sizes)
        if norms is not None and layer.pooled is not None:
            return add_pooled_choice(
                self._writer, self._norms, norms, layer.pooled, layer.rotary, **own
            )
        if norms is None or layer.blocks is None:
            return {}
        own["heads"] = sizes.kv_heads
        return add_block_choice(self._writer, self._norms, norms, layer.blocks, layer.rotary, **own)

    def _keep_sinks(self, refs: AttentionRefs) -> int:
        """Keep the sinks of a layer's heads; return their address, 0 for none."""
        if refs.sinks is None:
            return 0
        return self._writer.keep(self._writer.source.vector(refs.sinks.name, refs.sinks.size))

    def _rotate(
        self, refs: AttentionRefs, layer: LayerSpec, width: int, scales: tuple[float, float]
    ) -> None:
        spec, order, own = self._spec, None, self._heads_of(layer)
        size, padded = spec.sizes(layer).dim, is_padded(spec, layer)
        heads = (refs.query_norm, 0), (refs.key_norm, own["heads"] * size)
        if spec.query_key_norm == "whole":
            for norm, offset in heads:
                if norm is not None:
                    self._norms.add_in_place(norm, Buffer.QKV, width, offset)
            heads = (None, 0), (None, 0)
        elif any(norm and self._norms.is_centred(norm) for norm, _ in heads):  # ROTATE has no means
            for (norm, offset), count in zip(heads, (own["heads"], own["kv_heads"]), strict=True):
                if norm is not None:
                    self._norms.add_heads(norm, Buffer.QKV, width, offset, count)
            heads = (None, 0), (None, 0)
        if padded:
            order = add_padding(self._writer, spec, layer, width)
        elif layer.rotary is not None and needs_order(layer.rotary):
            order = head_order(layer.rotary, own["head_dim"])
            self._writer.add(Code.REORDER, order=self._writer.keep(order), width=width, **own)
        gains = [None if norm is None else self._norms.read_weight(norm) for norm, _ in heads]
        if normalises_plainly(spec, layer):
            gains = [np.ones(size, np.float32)] * 2
        query, key = (self._keep_gain(gain, order, own["head_dim"]) for gain in gains)
        scale, value = scales
        self._writer.add(
            Code.ROTATE,
            width=width,
            eps=spec.norm_eps * size / own["head_dim"],
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

    def _keep_gain(self, gain: Floats | None, order: Ints | None, size: int) -> int:
        """Keep the weights of the heads' norm, reordered and padded to `size`; return their
        address, 0 for none.
        """
        if gain is None:
            return 0
        if len(gain) < size:
            return self._writer.keep(pad_gain(gain, order, size))
        return self._writer.keep(gain if order is None else gain[order])


def _count_index_features(layer: LayerSpec, sizes: HeadSizes) -> int:
    """Return the features of an index of blocks in a layer's row of QKV, behind all others."""
    if layer.pooled is not None:
        return (layer.pooled.heads + 1) * layer.pooled.dim
    return 0 if layer.blocks is None else (sizes.kv_heads + 1) * layer.blocks.dim
