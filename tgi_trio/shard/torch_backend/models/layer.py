"""The weights of a layer of the generic decoder: attention or mixer, feed-forward, norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex
from tgi_trio.shard.torch_backend.layers.attention.cross_attention import CrossAttention
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex
from tgi_trio.shard.torch_backend.layers.attention.shared_key import SharedKey
from tgi_trio.shard.torch_backend.layers.beside import ExpertsBeside
from tgi_trio.shard.torch_backend.layers.linears.joined import JoinedLinears, join_linears
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import ExpertsMlp, Mlp
from tgi_trio.shard.torch_backend.layers.norm import DividedNorm, Norm
from tgi_trio.shard.torch_backend.layers.norm_gate import NormGate
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import PerLayerInput
from tgi_trio.shard.torch_backend.layers.shared_block import SharedUse
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import LayerStreams
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import LayerGates
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import LayerHyper
from tgi_trio.shard.torch_backend.states.ngrams_layer import NgramsLayer
from tgi_trio.shard.torch_backend.states.steps import MixerLayer


@dataclass(slots=True)
class Attention:
    """The weights of a layer's attention."""

    shape: AttentionLayer
    qkv: Linear  # rows of queries, keys, values; with latents, the down-projections
    latent: LatentProjections | None
    index: TokenIndex | None  # None: there is none, or the previous layer's choice is used
    blocks: BlockIndex | None  # None: all blocks are attended to
    output: Linear
    rotary: int  # index into the decoder's rotaries, -1: none
    query_norm: DividedNorm | None  # over all heads at once, of which ranks have some each
    key_norm: DividedNorm | None
    inner_norm: DividedNorm | None  # over what all heads say, before `output`
    head_norm: torch.Tensor | None  # [heads + kv_heads, head_dim] weights of per-head norms
    head_norm_bias: torch.Tensor | None
    norm_whole: bool  # see `HeadSteps`
    value_dim: int  # of each value in the cache
    keys_as_values: bool  # see `HeadSteps`
    shared_key: SharedKey | None = None  # then `qkv` has what it projects
    pooled: PooledIndex | None = None  # likewise, for what is attended to

    @property
    def plain(self) -> bool:
        """Whether heads attend to all tokens of a window, by keys and values of their own."""
        return not (self.latent or self.shared_key or self.blocks or self.pooled)

    @property
    def reads_input(self) -> bool:
        """Whether more than `qkv` reads the layer's input."""
        return self.index is not None and self.index.spec.reads_input

    def close(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum of attention's output, for what its heads say."""
        return self.output(output if self.inner_norm is None else self.inner_norm(output))

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        self.qkv.pack()
        self.output.pack()
        for part in (self.latent, self.index, self.shared_key):
            if part is not None:
                part.pack()

    def nbytes(self) -> int:
        around = [self.latent, self.index, self.shared_key, self.query_norm, self.key_norm]
        parts = [self.qkv, self.output, self.inner_norm, *around]
        plain = [self.head_norm, self.head_norm_bias]
        small = sum(t.nbytes for t in plain if t is not None)
        small += sum(index.nbytes() for index in (self.blocks, self.pooled) if index is not None)
        return small + sum(p.nbytes() for p in parts if p)


_Around: TypeAlias = (
    ExpertsBeside
    | ExpertsMlp
    | PerLayerInput
    | LayerStreams
    | SharedUse
    | CrossAttention
    | LayerHyper
    | LayerGates
    | NgramsLayer
    | NormGate
)


@dataclass(slots=True)
class Layer:
    """One layer's weights. Built by `decoder_loading.py`."""

    attention: Attention | None
    mixer: MixerLayer | None  # if there is attention as well, both outputs are added
    mlp: Mlp | None
    attention_norm: Norm | None  # before attention and mixer
    mlp_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    mlp_scale: float = 1.0  # of the MLP's result, before it is added
    mixer_scale: float = 1.0  # likewise
    # Of attention's `qkv` and what else reads its input, see `join`.
    joined: JoinedLinears | None = None
    attention_sum_norm: Norm | None = None  # of the sum with attention's result
    mlp_sum_norm: Norm | None = None
    beside: ExpertsBeside | None = None
    later: ExpertsMlp | None = None  # experts whose result is added after the next layer's MLP
    per_layer_input: PerLayerInput | None = None
    streams: LayerStreams | None = None
    scale: torch.Tensor | None = None  # [1]: multiplies the layer's output
    shared: SharedUse | None = None  # then attention and MLP are a block that several layers share
    cross_attention: CrossAttention | None = None  # to images; then there is no other attention
    hyper: LayerHyper | None = None
    gates: LayerGates | None = None
    ngrams: NgramsLayer | None = None
    attention_norm_gate: NormGate | None = None
    mlp_norm_gate: NormGate | None = None

    def _around(self) -> tuple[_Around | None, ...]:
        own = self.per_layer_input, self.streams, self.shared, self.cross_attention, self.hyper
        behind = self.attention_norm_gate, self.mlp_norm_gate
        return self.beside, self.later, *own, self.gates, self.ngrams, *behind

    def mixtures(self) -> tuple[ExpertsMlp, ...]:
        """Return the layer's mixtures of experts."""
        every = self.mlp, self.later, self.beside.experts if self.beside else None
        return tuple(mlp for mlp in every if isinstance(mlp, ExpertsMlp))

    @property
    def alongside(self) -> Linear | None:
        """What reads the input of attention beside its `qkv`, or in its place; None: nothing does.

        That is the first linear of a mixer, or of a low-rank detour.
        """
        if self.mixer is not None:
            return self.mixer.inner
        return None if self.streams is None else self.streams.detour_down

    def join(self) -> None:
        """Have attention's `qkv` and what is `alongside` multiplied at once, where it can be."""
        alongside = self.alongside
        if self.attention is not None and alongside is not None and self.shared is None:
            self.joined = join_linears(self.attention.qkv, alongside)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what attention's `qkv` and what is `alongside` say of their input `x` [T, hidden].

        [T, ...] each, whose rows may lie apart; None of a part that the layer lacks.
        """
        own, alongside, joined = self.attention, self.alongside, self.joined
        if own and joined and joined.serves(own.qkv, alongside):
            return joined.multiply(x)
        return own.qkv(x) if own else None, alongside(x) if alongside else None

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        for part in (self.attention, self.mixer, self.joined, self.mlp, *self._around()):
            if part is not None:
                part.pack()

    def nbytes(self) -> int:
        norms = [self.attention_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm]
        norms += [self.attention_sum_norm, self.mlp_sum_norm]
        parts = [self.attention, self.mixer, self.mlp, *self._around(), *norms]
        return sum(part.nbytes() for part in parts if part is not None)
