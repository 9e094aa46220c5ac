"""A layer that attends to images: what it adds to the tokens that it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi_trio.shard.torch_backend.layers.crossing import CrossAttention, Sight
from tgi_trio.shard.torch_backend.models.layer import Layer

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum of all ranks' parts


def cross(
    layer: Layer, crossing: CrossAttention, x: torch.Tensor, sight: Sight, reduce: Reduce
) -> torch.Tensor:
    """Return hidden states [T, hidden] behind a layer whose attention is `crossing`."""
    own = sight.pick(x)
    if layer.attention_norm is None or layer.mlp_norm is None or layer.mlp is None:
        raise ValueError("a layer that attends to images lacks parts")
    attended = reduce(crossing.attend(layer.attention_norm(own), sight))
    own = own + crossing.gate * sight.show(attended)
    found = reduce(layer.mlp(layer.mlp_norm(own)))
    return sight.place(x, own + crossing.mlp_gate * sight.feed(found))
