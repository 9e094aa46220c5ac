"""Loads a layer's attention: plain, over latents, by a token index, or to images."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.model.matrices.decoder import normalises_plainly
from tgi_trio.model.matrices.references import NormRef
from tgi_trio.model.matrices.roles import (
    AttentionRefs,
    BlockIndexRefs,
    CompressorRefs,
    CrossAttentionRefs,
    IndexRefs,
    LogScaleRefs,
    SharedKeyRefs,
)
from tgi_trio.model.specs.decoder import (
    CompressionSpec,
    DecoderSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    RotarySpec,
    SharedKeySpec,
)
from tgi_trio.model.split import check_gates, even_share, kv_head_share
from tgi_trio.model.tensors import kv_scales
from tgi_trio.shard.torch_backend.attention.alibi import alibi_slopes
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex
from tgi_trio.shard.torch_backend.layers.attention.compressor import Compressor
from tgi_trio.shard.torch_backend.layers.attention.cross_attention import CrossAttention, CrossLayer
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex
from tgi_trio.shard.torch_backend.layers.attention.shared_key import Entries, EntryIndex, SharedKey
from tgi_trio.shard.torch_backend.layers.linears.joined import join_linears
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.models.layer import Attention
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader
from tgi_trio.shard.torch_backend.weights import WeightSource


class AttentionLoader(WeightLoader):
    """Loads this rank's part of the attention of a decoder's layers."""

    def __init__(
        self,
        spec: DecoderSpec,
        source: WeightSource,
        ranks: Gathering | None = None,
        run: range | None = None,
    ) -> None:
        """`ranks`: as for `WeightLoader`. `run`: the layers that are loaded; None: all."""
        super().__init__(source, spec.norm, ranks)
        self.spec = spec
        self.run = range(len(spec.layers)) if run is None else run
        check_gates(spec, source.world_size)
        self.rotaries: list[RotarySpec] = []  # of all layers that have been loaded

    def heads(self, layer: LayerSpec) -> slice:
        """Return this rank's query heads of a layer."""
        count, source = self.spec.sizes(layer).heads, self.source
        return even_share(count, "attention heads", source.rank, source.world_size)

    def attention(self, index: int, layer: LayerSpec, refs: AttentionRefs) -> Attention:
        """Return this rank's heads of a layer."""
        norm_whole = self._normalises_whole(refs)
        divided = self.spec.query_key_norm == "whole" and not norm_whole
        shape = self.attention_shape(index, layer, refs)
        latent = self._latent(refs, self.spec.latent_of(layer), layer.rotary)
        head_norm, head_norm_bias = self._head_norms(layer, refs, shape)
        return Attention(
            shape=shape,
            qkv=self.linear(refs.qkv),
            latent=latent,
            index=self._index(refs.index, self.spec.index_of(layer), latent, layer.index_place),
            blocks=self._blocks(index, layer, refs.blocks, shape.kv_heads),
            pooled=self._pooled(index, layer, refs.blocks),
            output=self.linear(refs.output),
            rotary=self._rotary(layer.rotary),
            query_norm=self.divided_norm(refs.query_norm) if divided else None,
            key_norm=self.divided_norm(refs.key_norm) if divided else None,
            inner_norm=self.divided_norm(refs.inner_norm),
            head_norm=head_norm,
            head_norm_bias=head_norm_bias,
            norm_whole=norm_whole,
            value_dim=self.spec.sizes(layer).value_dim,
            keys_as_values=layer.keys_as_values,
            shared_key=self._shared_key(layer, refs.shared_key, self.spec.shared_key),
        )

    def attention_shape(self, index: int, layer: LayerSpec, refs: AttentionRefs) -> AttentionLayer:
        """Return this rank's heads of a layer, what they see, and where their K and V are."""
        spec = self.spec
        heads, count = self.heads(layer), spec.sizes(layer).heads
        slopes, sinks = None, self.vector(refs.sinks)[heads] if refs.sinks else None
        if spec.alibi:
            slopes = (alibi_slopes(count) * spec.alibi_scale)[heads]
            slopes = slopes.to(self.source.device)
        key_scale, value_scale = self.source.kv_scales(kv_scales(spec, index))
        sizes, kept_by = spec.sizes(layer), layer.reads_layer
        index_spec = layer.compression.index if layer.compression else spec.index_of(layer)
        kv_heads = kv_head_share(spec, sizes.kv_heads, self.source.rank, self.source.world_size)
        before = spec.layers[self.run.start : index if kept_by is None else kept_by]
        following = spec.layers[index + 1 : min(index + 2, self.run.stop)]
        return AttentionLayer(
            index=sum(each.attends and each.reads_layer is None for each in before),
            heads=heads.stop - heads.start,
            kv_heads=kv_heads.stop - kv_heads.start,
            head_dim=sizes.dim,
            scale=layer.scale,
            window=layer.window,
            chunk=layer.chunk,
            ahead=layer.ahead,
            soft_cap=spec.attention_soft_cap,
            slopes=slopes,
            # Latents are kept once, as keys.
            kv_scales=(key_scale, value_scale if spec.keeps_values else key_scale),
            value_dim=spec.latent.rank if spec.latent else 0,
            reads_only=kept_by is not None,
            most=index_spec.most if index_spec else 0,
            chosen_last=all(each.chooses for each in following),
            sinks=sinks,
        )

    def _rotary(self, rotary: RotarySpec | None) -> int:
        """Return the number of a rotary among those of all layers, -1 if there is none."""
        if rotary is None:
            return -1
        if rotary not in self.rotaries:
            self.rotaries.append(rotary)
        return self.rotaries.index(rotary)

    def _latent(
        self, own: AttentionRefs, latent: LatentSpec | None, rotary: RotarySpec | None
    ) -> LatentProjections | None:
        """Return a latent's projections for this rank's heads, None if there is no latent."""
        refs = own.latent
        if refs is None or latent is None:
            return None
        each = latent.plain_dim + latent.value_dim
        heads = self.weight(refs.up).view(-1, each, latent.rank)
        key, value = heads.split((latent.plain_dim, latent.value_dim), 1)
        latent_norm = self.optional_norm(refs.latent_norm)
        if latent_norm and latent.scale != 1.0 and latent_norm.weight is not None:
            latent_norm.weight = latent_norm.weight * latent.scale
        return LatentProjections(
            latent,
            query_norm=self.optional_norm(refs.query_norm),
            query_up=self.linear(refs.query_up) if refs.query_up else None,
            latent_norm=latent_norm,
            key_up=key.contiguous(),
            value_up=value.transpose(1, 2).contiguous(),
            gate_up=self.linear(refs.gate_up) if refs.gate_up else None,
            query_scale=self._log_scale(own.query_scale),
            by_position=rotary is not None and rotary.query_scale is not None,
            gated=self._values_of_gate(latent),
            invariant=self.source.invariant,
        )

    def _values_of_gate(self, latent: LatentSpec) -> int:
        """Return how many values of latents a gate opens as they are expanded, 0 if none does."""
        spec = self.spec
        if spec.gate_activation != "sigmoid":
            return 0
        return 1 if spec.gated_values else latent.value_dim * spec.gated_heads

    def _log_scale(self, refs: LogScaleRefs | None) -> LogScale | None:
        """Return what scales the queries of this rank's heads by position, None if nothing does."""
        return LogScale(self.tensor(refs.scale), self.tensor(refs.bias)) if refs else None

    def _index(
        self,
        refs: IndexRefs | None,
        index: IndexSpec | None,
        latent: LatentProjections | None,
        place: int,
    ) -> TokenIndex | None:
        """Return a layer's token index, the same on every rank; None if there is none.

        `latent`: of the layer, whose queries may be multiplied together with the index's.
        """
        if refs is None or index is None:
            return None
        weight, bias = (
            self.source.vector(name, index.dim)
            for name in (refs.key_norm.weight, refs.key_norm.bias)
        )
        key_norm = Norm(
            "layer",
            weight,
            bias,
            refs.key_norm.eps,
            index.dim,
            invariant=self.source.invariant,
        )
        query_up, joined = self.linear(refs.query_up), None
        alike = latent is not None and not index.reads_input and not latent.spec.doubled
        if alike and latent is not None and latent.query_up is not None:
            joined = join_linears(latent.query_up, query_up)
        return TokenIndex(
            index,
            query_up=query_up,
            key_norm=key_norm,
            pool_bias=self.tensor(refs.pool_bias, torch.float32) if refs.pool_bias else None,
            rotary=self._rotary(index.rotary),
            query_norm=self.optional_norm(refs.query_norm),
            query_scale=self._log_scale(refs.query_scale),
            place=place,
            joined=joined,
        )

    def _shared_key(
        self, layer: LayerSpec, refs: SharedKeyRefs | None, shared: SharedKeySpec | None
    ) -> SharedKey | None:
        """Return what is around a layer's attention to one key per token; None if it has another.

        Entries and their index are the same on every rank.
        """
        if refs is None or shared is None:
            return None
        spec, inputs = self.spec, self.spec.heads * self.spec.head_dim // shared.groups
        query_up = self.linear(refs.query_up)
        return SharedKey(
            dim=spec.head_dim,
            eps=spec.norm_eps,
            query_norm=self.norm(refs.query_norm),
            query_up=query_up,
            key_norm=self.norm(refs.key_norm),
            output_down=self.weight(refs.output_down).view(-1, shared.group_rank, inputs),
            entries=self._entries(refs, layer.compression, query_up),
            invariant=self.source.invariant,
        )

    def _entries(
        self, refs: SharedKeyRefs, compression: CompressionSpec | None, query_up: Linear
    ) -> Entries | None:
        """Return what makes a layer's entries; `query_up`: multiplied with an index's at once."""
        if compression is None or refs.compressor is None:
            return None
        index = None
        spec = compression.index
        if spec and refs.index_query and refs.index_compressor:
            own_up = self.linear(refs.index_query)
            index = EntryIndex(
                spec.heads,
                own_up,
                self._compressor(refs.index_compressor, spec.dim, compression),
                joined=join_linears(query_up, own_up),
            )
        own = self._compressor(refs.compressor, self.spec.head_dim, compression)
        return Entries(compression, own, index)

    def _compressor(
        self, refs: CompressorRefs, dim: int, compression: CompressionSpec
    ) -> Compressor:
        bias = self.tensor(refs.bias, torch.float32)
        return Compressor(dim, compression.overlaps, bias, self.norm(refs.norm))

    def _blocks(
        self, index: int, layer: LayerSpec, refs: BlockIndexRefs | None, heads: int
    ) -> BlockIndex | None:
        """Return the block index of layer number `index`, with a head for each KV head."""
        if refs is None or layer.blocks is None:
            return None
        return BlockIndex(
            layer.blocks,
            heads=heads,
            query_norm=self.norm(refs.query_norm),
            key_norm=self.norm(refs.key_norm),
            number=self._index_layer(index),
        )

    def _pooled(
        self, index: int, layer: LayerSpec, refs: BlockIndexRefs | None
    ) -> PooledIndex | None:
        """Return the pooled index of layer number `index`, the same on every rank."""
        if refs is None or layer.pooled is None:
            return None
        return PooledIndex(
            layer.pooled,
            query_norm=self.norm(refs.query_norm),
            key_norm=self.norm(refs.key_norm),
            number=self._index_layer(index),
        )

    def _index_layer(self, index: int) -> int:
        """Return the layer of the KV cache with the index keys of layer number `index`."""
        ours = [self.spec.layers[i] for i in self.run]
        kept = (each.attends and each.reads_layer is None for each in ours)
        before = (bool(each.blocks or each.pooled) for each in ours[: index - self.run.start])
        return sum(kept) + sum(before)

    def _head_norms(
        self, layer: LayerSpec, refs: AttentionRefs, shape: AttentionLayer
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return per-head norm weights [heads + kv_heads, head_dim] and biases.

        Without rows for the KV heads if the layer's keys have no norm.
        """
        if normalises_plainly(self.spec, layer):
            heads = shape.heads + shape.kv_heads
            return torch.ones(heads, shape.head_dim, device=self.source.device), None
        if self._normalises_whole(refs):
            names = [norm.weight for norm in (refs.query_norm, refs.key_norm) if norm]
            counts = (shape.heads, shape.kv_heads)
            weights = [
                self.source.vector(name, count * shape.head_dim)
                for name, count in zip(names, counts, strict=True)
            ]
            return torch.cat(weights).view(-1, shape.head_dim), None
        if self.spec.query_key_norm == "each":
            each = [self._head_norms_of(ref) for ref in (refs.query_norm, refs.key_norm) if ref]
            return torch.cat(each), None
        if self.spec.query_key_norm != "head" or refs.query_norm is None:
            return None, None
        norms = [(refs.query_norm, shape.heads)]
        if refs.key_norm is not None:
            norms.append((refs.key_norm, shape.kv_heads))
        weight = self._head_vectors([(ref.weight, ref.size, heads) for ref, heads in norms])
        if self.spec.norm == "rms_plus_one":
            weight = weight.float() + 1.0
        if not refs.query_norm.bias:
            return weight, None
        return weight, self._head_vectors([(ref.bias, ref.size, heads) for ref, heads in norms])

    def _normalises_whole(self, refs: AttentionRefs) -> bool:
        """Return whether all heads of queries are normalised at once, and all of keys, on a rank.

        As `HeadSteps` do it: by RMS, with weights.
        """
        if self.spec.query_key_norm != "whole" or self.ranks is not None:
            return False
        return all(
            norm is not None
            and (norm.kind or self.spec.norm, norm.eps) == ("rms", self.spec.norm_eps)
            and bool(norm.weight)
            and not norm.bias
            for norm in (refs.query_norm, refs.key_norm)
        )

    def _head_norms_of(self, ref: NormRef) -> torch.Tensor:
        """Return the norm weights [heads, head_dim] of this rank's heads, each with its own."""
        if ref.heads is None:
            raise ValueError(f"{ref.weight} is not of heads with weights of their own")
        return self.source.head_norms(ref, self.share(ref.heads))

    def _head_vectors(self, parts: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """Return [all heads, size] from vectors, given by name, size and number of heads."""
        vectors = ((self.source.vector(name, size), size, heads) for name, size, heads in parts)
        return torch.cat([vector.expand(heads, size) for vector, size, heads in vectors])

    def cross_attention(
        self, index: int, layer: LayerSpec, refs: CrossAttentionRefs | None
    ) -> CrossAttention | None:
        """Return a layer's cross-attention to images, None if it has none."""
        if refs is None:
            return None
        heads = self.heads(layer)
        gate, mlp_gate = (self.tensor(ref).tanh().flatten() for ref in (refs.gate, refs.mlp_gate))
        return CrossAttention(
            CrossLayer(
                number=sum(each.cross_attention is not None for each in self.spec.layers[:index]),
                heads=heads.stop - heads.start,
                head_dim=self.spec.head_dim,
                scale=layer.scale,
            ),
            query=self.linear(refs.query),
            query_norm=self.optional_norm(refs.query_norm),
            output=self.linear(refs.output),
            gate=gate,
            mlp_gate=mlp_gate,
        )
