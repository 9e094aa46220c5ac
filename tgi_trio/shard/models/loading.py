"""Weights of a checkpoint -> a Decoder, as its spec names them and as this rank needs them."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.attention.alibi import alibi_slopes
from tgi_trio.shard.attention.interface import AttentionLayer
from tgi_trio.shard.layers.latent import LatentProjections
from tgi_trio.shard.layers.linear import Linear
from tgi_trio.shard.layers.rotary import Rotary
from tgi_trio.shard.models.decoder import Decoder, Layer, Ranks
from tgi_trio.shard.models.mlp_loading import load_mlp
from tgi_trio.shard.models.parts import Parts, joined, times
from tgi_trio.shard.models.specs import DecoderSpec, LatentSpec, LayerSpec, RotarySpec
from tgi_trio.shard.weights import WeightSource


def load_decoder(spec: DecoderSpec, source: WeightSource, ranks: Ranks | None = None) -> Decoder:
    """Read every weight of `spec`; raises ModelLoadError naming one that is missing or misshapen.

    Linears are packed as they are read, so that only one layer is ever held twice.
    Heads, MLP columns and the vocabulary are split over the ranks; norms are whole on each.
    """
    return _Loader(spec, source).decoder(ranks)


_LATENT_EPS = 1e-6  # of the norms of what is compressed, whatever the layers' is


class _Loader(Parts):
    def __init__(self, spec: DecoderSpec, source: WeightSource) -> None:
        super().__init__(spec, source)
        self.heads = source.share(spec.heads, "attention heads")
        self.kv_heads = self.kv_share()
        self.vocabulary = source.block(spec.vocab_size)
        self.rotaries: list[RotarySpec] = []

    def decoder(self, ranks: Ranks | None) -> Decoder:
        spec, names, source = self.spec, self.names, self.source
        embedding = self.vocabulary_rows(names.embedding)
        positions = None
        if spec.position_rows:
            shape = (spec.position_rows, spec.hidden_size)
            positions = source.matrix(f"{names.positions}.weight", shape)
        layers = []
        for index, layer_spec in enumerate(spec.layers):
            layers.append(self.layer(index, layer_spec))
            layers[-1].pack()
        head = embedding if spec.tied_head else self.vocabulary_rows(names.head)
        if spec.normalised_head:
            head = functional.normalize(head)
        head_bias = None
        if spec.head_bias:
            head_bias = source.vector(f"{names.head}.bias", spec.vocab_size, self.vocabulary)
        head_linear = Linear(head, head_bias)
        head_linear.pack()
        return Decoder(
            spec,
            layers=layers,
            rotaries=[Rotary(rotary, source.device) for rotary in self.rotaries],
            embedding=embedding,
            positions=positions,
            embedding_norm=self.norm("", names.embedding_norm, spec.hidden_size),
            final_norm=self.norm("", names.final_norm, spec.hidden_size),
            head=head_linear,
            vocabulary=self.vocabulary,
            ranks=ranks,
        )

    def kv_share(self) -> slice:
        """Return this rank's KV heads: its part, or where there are fewer than ranks a whole one.

        A rank's query heads then all belong to the KV head it shares with its neighbours.
        """
        spec, source = self.spec, self.source
        if spec.kv_heads >= source.world_size or source.world_size % spec.kv_heads:
            return source.share(spec.kv_heads, "key-value heads")
        if spec.query_key_norm == "whole":
            raise ModelLoadError(
                f"Model type {spec.family!r} normalises all key heads together and has "
                f"{spec.kv_heads} of them; choose a --num-shard that divides {spec.kv_heads}."
            )
        index = source.rank * spec.kv_heads // source.world_size
        return slice(index, index + 1)

    def vocabulary_rows(self, name: str) -> torch.Tensor:
        spec = self.spec
        return self.source.matrix(
            f"{name}.weight",
            (spec.vocab_size, spec.hidden_size),
            rows=self.vocabulary,
        )

    def layer(self, index: int, layer: LayerSpec) -> Layer:
        spec, names = self.spec, self.names
        prefix = names.layer.format(index)
        whole = spec.query_key_norm == "whole"
        head_norm, head_norm_bias = self.head_norms(prefix)
        value_dim = spec.latent.value_dim if spec.latent else spec.head_dim
        return Layer(
            attention=self.attention(index, layer),
            qkv=self.latent_qkv(prefix, spec.latent) if spec.latent else self.qkv(prefix),
            latent=self.latent(prefix, spec.latent) if spec.latent else None,
            output=self.row_linear(
                prefix + names.output,
                spec.heads * value_dim,
                times(self.heads, value_dim),
                spec.output_bias,
            ),
            mlp=load_mlp(self, prefix, layer),
            rotary=self.rotary(layer.rotary),
            attention_norm=self.norm(prefix, names.attention_norm, spec.hidden_size),
            mlp_norm=self.norm(prefix, names.mlp_norm, spec.hidden_size),
            attention_post_norm=self.norm(prefix, names.attention_post_norm, spec.hidden_size),
            mlp_post_norm=self.norm(prefix, names.mlp_post_norm, spec.hidden_size),
            query_norm=self.norm(
                prefix, names.query_norm if whole else "", spec.heads * spec.head_dim
            ),
            key_norm=self.norm(
                prefix, names.key_norm if whole else "", spec.kv_heads * spec.head_dim
            ),
            head_norm=head_norm,
            head_norm_bias=head_norm_bias,
        )

    def attention(self, index: int, layer: LayerSpec) -> AttentionLayer:
        spec = self.spec
        slopes = None
        if spec.alibi:
            slopes = (alibi_slopes(spec.heads) * spec.alibi_scale)[self.heads]
            slopes = slopes.to(self.source.device)
        return AttentionLayer(
            index=index,
            heads=self.heads.stop - self.heads.start,
            kv_heads=self.kv_heads.stop - self.kv_heads.start,
            head_dim=spec.head_dim,
            scale=layer.scale,
            window=layer.window,
            soft_cap=spec.attention_soft_cap,
            slopes=slopes,
        )

    def rotary(self, rotary: RotarySpec | None) -> int:
        if rotary is None:
            return -1
        if rotary not in self.rotaries:
            self.rotaries.append(rotary)
        return self.rotaries.index(rotary)

    def qkv(self, prefix: str) -> Linear:
        """Return query, key and value rows of this rank as one linear."""
        spec, names = self.spec, self.names
        if spec.qkv_layout == "separate":
            wanted = (
                (names.query, spec.heads, self.heads),
                (names.key, spec.kv_heads, self.kv_heads),
                (names.value, spec.kv_heads, self.kv_heads),
            )
            parts = [
                self.column_linear(
                    prefix + name,
                    total * spec.head_dim,
                    times(part, spec.head_dim),
                    spec.qkv_bias,
                )
                for name, total, part in wanted
            ]
        else:
            parts = [self.packed_qkv(prefix + names.qkv)]
        return joined(parts)

    def latent_qkv(self, prefix: str, latent: LatentSpec) -> Linear:
        """Return the rows that queries start from, of the latent, and of the rotated key."""
        names, dim = self.names, latent.plain_dim + latent.rotary_dim
        if latent.query_rank:
            everything = slice(0, latent.query_rank)
            query = self.column_linear(
                prefix + names.query_down, latent.query_rank, everything, latent.bias
            )
        else:
            rows = times(self.heads, dim)
            query = self.column_linear(prefix + names.query, self.spec.heads * dim, rows, False)
        width = latent.rank + latent.rotary_dim
        down = self.column_linear(prefix + names.latent_down, width, slice(0, width), latent.bias)
        return joined([query, down])

    def latent(self, prefix: str, latent: LatentSpec) -> LatentProjections:
        """Return what becomes of those rows, for this rank's heads."""
        spec, names = self.spec, self.names
        dim = latent.plain_dim + latent.rotary_dim
        query_up = query_norm = None
        if latent.query_rank:
            rows = times(self.heads, dim)
            query_up = self.column_linear(
                prefix + names.query_up, spec.heads * dim, rows, False, latent.query_rank
            )
            query_norm = self.norm(prefix, names.query_norm, latent.query_rank, _LATENT_EPS)
        each = latent.plain_dim + latent.value_dim
        up = self.source.matrix(
            f"{prefix}{names.latent_up}.weight",
            (spec.heads * each, latent.rank),
            rows=times(self.heads, each),
        )
        key, value = up.view(-1, each, latent.rank).split((latent.plain_dim, latent.value_dim), 1)
        latent_norm = self.norm(prefix, names.latent_norm, latent.rank, _LATENT_EPS)
        if latent_norm is None:
            raise ValueError(f"{spec.family}: names lack latent_norm")
        return LatentProjections(
            latent,
            query_norm=query_norm,
            query_up=query_up,
            latent_norm=latent_norm,
            key_up=key.contiguous(),
            value_up=value.transpose(1, 2).contiguous(),
        )

    def packed_qkv(self, name: str) -> Linear:
        spec = self.spec
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        weight = self.source.matrix(
            f"{name}.weight", (rows, spec.hidden_size), transposed=spec.transposed
        )
        order = self.qkv_rows().to(weight.device)
        bias = self.source.vector(f"{name}.bias", rows)[order] if spec.qkv_bias else None
        return Linear(weight[order], bias)

    def qkv_rows(self) -> torch.Tensor:
        """Return which rows of a packed tensor are this rank's queries, keys and values."""
        spec = self.spec
        heads = torch.arange(spec.heads + 2 * spec.kv_heads)
        if spec.qkv_layout == "stacked":
            query, key, value = heads.split((spec.heads, spec.kv_heads, spec.kv_heads))
        else:
            by_group = heads.view(spec.kv_heads, -1)
            query, key, value = by_group[:, :-2].flatten(), by_group[:, -2], by_group[:, -1]
        mine = torch.cat((query[self.heads], key[self.kv_heads], value[self.kv_heads]))
        return (mine[:, None] * spec.head_dim + torch.arange(spec.head_dim)).flatten()

    def head_norms(self, prefix: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return per-head norm weights [heads + kv_heads, head_dim] and biases."""
        spec, names = self.spec, self.names
        if spec.query_key_norm != "head":
            return None, None
        query, key = prefix + names.query_norm, prefix + names.key_norm
        weight = self.head_vectors(query, key, "weight")
        if spec.norm == "rms_plus_one":
            weight = weight.float() + 1.0
        biased = spec.query_key_norm_bias
        return weight, self.head_vectors(query, key, "bias") if biased else None

    def head_vectors(self, query: str, key: str, what: str) -> torch.Tensor:
        size = self.spec.head_dim
        parts = []
        for name, heads in ((query, self.heads), (key, self.kv_heads)):
            count = heads.stop - heads.start
            parts.append(self.source.vector(f"{name}.{what}", size).expand(count, size))
        return torch.cat(parts)
