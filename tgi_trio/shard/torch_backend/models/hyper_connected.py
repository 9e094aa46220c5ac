"""Layers between several hidden states of a token, of which they read a sum (`HyperSpec`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.mlp import Mlp
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import HyperEnds
from tgi_trio.shard.torch_backend.models.layer import Layer

Mix = Callable[[int, torch.Tensor], torch.Tensor]  # attention of a layer
# An MLP, for its input and the step's tokens.
Feed = Callable[[Mlp, torch.Tensor, torch.Tensor | None], torch.Tensor | ExpertParts]


def run_hyper_connected(
    ends: HyperEnds,
    layers: Sequence[Layer],
    x: torch.Tensor,
    ids: torch.Tensor | None,
    mix: Mix,
    feed: Feed,
) -> torch.Tensor:
    """Return the output of all layers for the input `x` [T, hidden]; `ids`: its tokens, int64 [T].

    `mix` and `feed`: the decoder's attention and MLPs.
    """
    states, behind = ends.split(x), [layer.hyper for layer in layers[1:]]
    for index, layer in enumerate(layers):
        hyper, mlp = layer.hyper, layer.mlp
        before, inner = layer.attention_norm, layer.mlp_norm
        assert hyper is not None and mlp is not None and before is not None and inner is not None
        normed, post, mixture = hyper.attention.enter(states, before)
        found = mix(index, normed)
        states = hyper.attention.leave(states, found, post, mixture, hyper.mlp.weights)
        normed, post, mixture = hyper.mlp.enter(states, inner)
        later = behind[index] if index < len(behind) else None
        following = ends.weights if later is None else later.attention.weights
        states = hyper.mlp.leave(states, feed(mlp, normed, ids), post, mixture, following)
    return ends.join(states)
