"""Lists those of a decoder's linears that read the norm of a sum, and the sum's addends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.attention.paged.few_heads import HeadProjection
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.linears.few_rows import Projection
from tgi_trio.shard.torch_backend.layers.linears.joined import list_multiplied
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.models.layer import Attention, Layer


class Mixed(NamedTuple):
    """What attention and mixer of a layer say, [T, hidden] each, not scaled; None: it lacks one."""

    attended: torch.Tensor | None
    kept: torch.Tensor | None


class Sums:
    """What is added to the hidden state after attention and after the MLP of a layer."""

    def __init__(self, spec: DecoderSpec, *, divided: bool) -> None:
        """`divided`: ranks have a part of each layer."""
        self._divided = divided
        self.parallel = spec.parallel
        self._scale = spec.residual_scale
        self._attention_scale = spec.attention_scale

    def attends_alone(self, layer: Layer) -> bool:
        """Return whether only attention's first linear reads the norm of a layer's input."""
        if layer.attention is not None and layer.attention.reads_input:
            return False
        if layer.attention_norm_gate is not None:
            return False
        return layer.alongside is None and not self.parallel and self._attention_scale == 1.0

    def of_attention(self, layer: Layer, mixed: torch.Tensor) -> Addends:
        """Return the output `mixed` of a layer's attention or mixer as it is added."""
        return Addends(mixed, norm=layer.attention_post_norm, scale=self._scale)

    def of_both(self, layer: Layer, mixed: Addends, found: torch.Tensor) -> Addends:
        """Return attention's addends, and the output `found` of an MLP that is parallel to it."""
        return mixed._replace(second=found, second_scale=layer.mlp_scale)

    def mix(self, layer: Layer, mixed: Mixed) -> torch.Tensor:
        """Return the scaled sum of what attention and mixer say."""
        attended, kept = mixed
        scaled = [
            output if scale == 1.0 else output * scale
            for output, scale in ((attended, self._attention_scale), (kept, layer.mixer_scale))
            if output is not None
        ]
        return scaled[0] if len(scaled) == 1 else scaled[0] + scaled[1]

    def adds_each(self, layer: Layer) -> bool:
        """Return whether what attention and mixer say is added one after the other.

        Otherwise their sum is: it is one of all ranks, it is normalised, or an MLP comes beside it.
        """
        both = layer.attention is not None and layer.mixer is not None
        return both and not layer.attention_post_norm and not self.parallel and not self._divided

    def of_each(self, layer: Layer, attended: torch.Tensor, kept: torch.Tensor) -> Addends:
        """Return what attention and mixer say as it is added."""
        scales = self._scale * self._attention_scale, self._scale * layer.mixer_scale
        return Addends(attended, kept, scale=scales[0], second_scale=scales[1])

    def of_mlp(self, layer: Layer, found: torch.Tensor | ExpertParts) -> Addends:
        """Return the output `found` of a layer's MLP as it is added."""
        return Addends(found, norm=layer.mlp_post_norm, scale=self._scale * layer.mlp_scale)


def list_linears(layers: Sequence[Layer]) -> Iterator[Linear]:
    """Yield the linears of layers that every token is multiplied with."""
    for layer in layers:
        own, mixer = layer.attention, layer.mixer
        yield from list_multiplied(layer.joined, own.qkv if own else None, layer.alongside)
        if own is not None:
            yield from _list_inner(own)
            yield own.output
        if mixer is not None:
            yield mixer.output
        if isinstance(layer.mlp, DenseMlp):
            yield from (layer.mlp.up, layer.mlp.down)


def _list_inner(own: Attention) -> Iterator[Linear]:
    """Yield the linears between the first and the last one of attention."""
    latent, index, shared = own.latent, own.index, own.shared_key
    if latent is not None:
        yield from list_multiplied(latent.joined, latent.query_up, latent.gate_up)
        if index is not None:  # queries by themselves are of steps in which nothing is chosen
            every = list_multiplied(index.joined, latent.query_up, index.query_up)
            yield from (each for each in every if each is not latent.query_up)
    if shared is not None:
        chooses = shared.entries.index if shared.entries else None
        asking = (chooses.joined, chooses.query_up) if chooses else (None, None)
        yield from list_multiplied(asking[0], shared.query_up, asking[1])


def list_projections(layers: Sequence[Layer], sums: Sums) -> Iterator[Projection]:
    """Yield those of `list_linears` that read the norm of a sum, or the sum itself."""
    for i, layer in enumerate(layers):
        summed = i > 0 and layers[i - 1].mlp_sum_norm is None
        if summed and layer.attention is not None and sums.attends_alone(layer):
            before = sums.of_mlp(layers[i - 1], layer.attention.qkv.weight)
            yield Projection(layer.attention.qkv, layer.attention_norm, None, before)
        apart = sums.parallel or layer.attention_sum_norm is not None
        if isinstance(layer.mlp, DenseMlp) and not apart and layer.mlp_norm_gate is None:
            like = layer.mlp.up.weight
            each = sums.adds_each(layer)
            before = sums.of_each(layer, like, like) if each else sums.of_attention(layer, like)
            yield Projection(layer.mlp.up, layer.mlp_norm, layer.mlp.act, before)


def list_head_projections(
    layers: Sequence[Layer], sums: Sums, steps: Mapping[int, HeadSteps]
) -> Iterator[tuple[HeadProjection, Addends | None]]:
    """Yield projections of heads, with what is added before them: None in the first layer, and
    where the sum is normalised itself.

    `steps`: what is done with a layer's heads, by number of the layer.
    """
    before: Addends | None = None
    for i, layer in enumerate(layers):
        own = layer.attention
        if own is not None and sums.attends_alone(layer):
            plain = own.latent is None and own.shared_key is None
            if plain and not own.query_norm and not own.key_norm:
                yield HeadProjection(own.qkv, layer.attention_norm, steps[i]), before
            settled = layer.mlp_sum_norm is not None
            before = None if settled else sums.of_mlp(layer, own.qkv.weight)
