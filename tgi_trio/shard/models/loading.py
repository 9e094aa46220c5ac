"""Weights of a checkpoint -> a Decoder, as its spec names them and as this rank needs them."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.attention.alibi import alibi_slopes
from tgi_trio.shard.attention.interface import AttentionLayer
from tgi_trio.shard.layers.activation import activation
from tgi_trio.shard.layers.linear import Linear
from tgi_trio.shard.layers.mlp import DenseMlp, ExpertsMlp, Mlp
from tgi_trio.shard.layers.norm import Norm
from tgi_trio.shard.layers.rotary import Rotary
from tgi_trio.shard.models.decoder import Decoder, Layer, Ranks
from tgi_trio.shard.models.specs import DecoderSpec, ExpertsSpec, LayerSpec, RotarySpec
from tgi_trio.shard.weights import WeightSource


def load_decoder(spec: DecoderSpec, source: WeightSource, ranks: Ranks | None = None) -> Decoder:
    """Read every weight of `spec`; raises ModelLoadError naming one that is missing or misshapen.

    Linears are packed as they are read, so that only one layer is ever held twice.
    Heads, MLP columns and the vocabulary are split over the ranks; norms are whole on each.
    """
    return _Loader(spec, source).decoder(ranks)


class _Loader:
    def __init__(self, spec: DecoderSpec, source: WeightSource) -> None:
        self.spec = spec
        self.names = spec.names
        self.source = source
        self.heads = source.share(spec.heads, "attention heads")
        self.kv_heads = self.kv_share()
        self.vocabulary = source.block(spec.vocab_size)
        self.columns = source.share(spec.mlp_width, "MLP columns")
        # Partial sums are added up over the ranks, so a bias may be counted on one only.
        self.first = source.rank == 0
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
        return Layer(
            attention=self.attention(index, layer),
            qkv=self.qkv(prefix),
            output=self.row_linear(
                prefix + names.output,
                spec.heads * spec.head_dim,
                self.dims(self.heads),
                spec.output_bias,
            ),
            mlp=self.mlp(prefix, layer),
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

    def dims(self, heads: slice) -> slice:
        return slice(heads.start * self.spec.head_dim, heads.stop * self.spec.head_dim)

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
                    prefix + n, total * spec.head_dim, self.dims(part), spec.qkv_bias
                )
                for n, total, part in wanted
            ]
        else:
            parts = [self.packed_qkv(prefix + names.qkv)]
        return _joined(parts)

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

    def mlp(self, prefix: str, layer: LayerSpec) -> Mlp:
        if layer.experts is not None:
            return self.experts(prefix, layer.experts)
        spec, names, width = self.spec, self.names, self.spec.mlp_width
        bias = spec.mlp_bias
        if names.gate_up:
            both = self.source.matrix(
                f"{prefix}{names.gate_up}.weight", (2 * width, spec.hidden_size)
            )
            gate, up = both.chunk(2)
            inner = Linear(torch.cat((gate[self.columns], up[self.columns])))
        else:
            names_up = [names.gate, names.up] if spec.gated else [names.up]
            inner = _joined(
                [self.column_linear(prefix + n, width, self.columns, bias) for n in names_up]
            )
        down = self.row_linear(prefix + names.down, width, self.columns, bias)
        return DenseMlp(inner, down, activation(spec.activation), spec.gated)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertsMlp:
        names, act = self.names, activation(self.spec.activation)
        hidden = self.spec.hidden_size

        def gated(place: str, gate: str, up: str, down: str, width: int) -> DenseMlp:
            part = self.source.share(width, "MLP columns")
            both = [self.column_linear(place + n, width, part, False) for n in (gate, up)]
            return DenseMlp(
                _joined(both), self.row_linear(place + down, width, part, False), act, gated=True
            )

        shared = shared_router = None
        if spec.shared_width:
            place = prefix + names.shared_expert
            shared = gated(place, "gate_proj", "up_proj", "down_proj", spec.shared_width)
            router = self.source.matrix(f"{prefix}{names.shared_router}.weight", (1, hidden))
            shared_router = Linear(router)
        own = (names.expert_gate, names.expert_up, names.expert_down)
        router = self.source.matrix(f"{prefix}{names.router}.weight", (spec.count, hidden))
        return ExpertsMlp(
            router=Linear(router),
            experts=[
                gated(prefix + names.experts.format(i), *own, spec.width) for i in range(spec.count)
            ],
            per_token=spec.per_token,
            normalise=spec.normalise,
            shared=shared,
            shared_router=shared_router,
        )

    def column_linear(self, name: str, rows: int, part: slice, bias: bool) -> Linear:
        """Return the output features `part` of a linear."""
        spec = self.spec
        weight = self.source.matrix(
            f"{name}.weight",
            (rows, spec.hidden_size),
            rows=part,
            transposed=spec.transposed,
        )
        return Linear(weight, self.source.vector(f"{name}.bias", rows, part) if bias else None)

    def row_linear(self, name: str, columns: int, part: slice, bias: bool) -> Linear:
        """Return a linear over the input features `part`."""
        spec = self.spec
        weight = self.source.matrix(
            f"{name}.weight",
            (spec.hidden_size, columns),
            columns=part,
            transposed=spec.transposed,
        )
        wanted = bias and self.first
        return Linear(
            weight, self.source.vector(f"{name}.bias", spec.hidden_size) if wanted else None
        )

    def norm(self, prefix: str, name: str, size: int) -> Norm | None:
        if not name:
            return None
        spec, path = self.spec, prefix + name
        weight = self.source.vector(f"{path}.weight", size) if spec.norm_weight else None
        bias = self.source.vector(f"{path}.bias", size) if spec.norm_bias else None
        return Norm(spec.norm, weight, bias, spec.norm_eps, size)

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


def _joined(parts: list[Linear]) -> Linear:
    """Return one linear whose outputs are those of `parts` in order."""
    if len(parts) == 1:
        return parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
