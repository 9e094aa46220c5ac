"""Gemma 3n's layers: several hidden states (AltUp), of which each layer computes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.mlp import Mlp
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import PerLayerInput
from tgi_trio.shard.torch_backend.layers.streams.alternating_parts import Added
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import LayerStreams, Streams

# Of a layer, for its queries, K and V and what is beside them.
Attend = Callable[[int, torch.Tensor, BesideHeads], torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Parts(Protocol):
    """The parts of a decoder's layer that are used here; none of them may be None."""

    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp: Mlp | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    per_layer_input: PerLayerInput | None
    streams: LayerStreams | None

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]: ...


def run_streamed(
    streams: Streams,
    layers: Sequence[Parts],
    x: torch.Tensor,
    own: torch.Tensor,
    attend: Attend,
    reduce: Reduce,
) -> torch.Tensor:
    """Return the output of all layers for the input `x` [T, hidden].

    `own` [layers, T, width]: the layers' own embeddings of the tokens; `attend` and `reduce`: the
    decoder's attention and sum over ranks.
    """
    hidden, added = streams.split(x), None
    for index, layer in enumerate(layers):
        hidden, added = _run_layer(layer, hidden, added, own[index], partial(attend, index), reduce)
    return streams.join(hidden, added)


def _run_layer(
    layer: Parts,
    streams: torch.Tensor,
    added: Added | None,
    own: torch.Tensor,
    attend: Callable[[torch.Tensor, BesideHeads], torch.Tensor],
    reduce: Reduce,
) -> tuple[torch.Tensor, Added]:
    """Return the streams [count, T, hidden] after a layer, and what is still to be added to them.

    `added`: by the layer before.
    """
    altup, per_layer_input = layer.streams, layer.per_layer_input
    norms = layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm
    before, after, inner, outer = norms
    assert altup and per_layer_input and layer.mlp and before and after and inner and outer
    predicted, normed = altup.predict(streams, added, before)
    qkv, low = layer.project(normed)
    assert qkv is not None and low is not None
    detour = altup.expand(low)
    attended = attend(qkv, detour)
    x, read = altup.join(predicted, normed, attended, detour.found, after, inner)
    corrected, shown = altup.correct(predicted, x, reduce(layer.mlp(read)), outer)
    return corrected, Added(per_layer_input(shown, own), per_layer_input.post_norm)
