"""Gemma 3n's layers: several hidden states (AltUp), of which each layer computes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from tgi_trio.shard.torch_backend.layers.mlp import Mlp
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.own_inputs import OwnInput
from tgi_trio.shard.torch_backend.layers.streams import LayerStreams, Streams

Mix = Callable[[int, torch.Tensor], torch.Tensor]  # attention of a layer
Reduce = Callable[[torch.Tensor], torch.Tensor]

_BOTH = 2.0**-0.5  # scales the sum of attention's and Laurel's outputs


class Parts(Protocol):
    """The parts of a decoder's layer that are used here; none of them may be None."""

    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp: Mlp | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    own_input: OwnInput | None
    streams: LayerStreams | None


def run_streamed(
    streams: Streams,
    layers: Sequence[Parts],
    x: torch.Tensor,
    own: torch.Tensor,
    mix: Mix,
    reduce: Reduce,
) -> torch.Tensor:
    """Return the output of all layers for the input `x` [T, hidden].

    `own` [layers, T, width]: the layers' own embeddings of the tokens; `mix` and `reduce`: the
    decoder's attention and sum over ranks.
    """
    hidden = streams.split(x)
    for index, layer in enumerate(layers):
        hidden = _run_layer(layer, hidden, own[index], partial(mix, index), reduce)
    return streams.join(hidden)


def _run_layer(
    layer: Parts, streams: torch.Tensor, own: torch.Tensor, mix: Reduce, reduce: Reduce
) -> torch.Tensor:
    """Return the streams [count, T, hidden] after a layer."""
    altup, own_input = layer.streams, layer.own_input
    norms = layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm
    before, after, inner, outer = norms
    assert altup and own_input and layer.mlp and before and after and inner and outer
    predicted = altup.predict(streams)
    active = predicted[altup.spec.active]
    normed = before(active)
    x = (active + after(mix(normed)) + altup.detour(normed)) * _BOTH
    x = x + outer(reduce(layer.mlp(inner(x))))
    corrected = altup.correct(predicted, x)
    added = own_input.post_norm(own_input(altup.shown(corrected), own))
    return torch.cat((corrected[:1], corrected[1:] + added))
