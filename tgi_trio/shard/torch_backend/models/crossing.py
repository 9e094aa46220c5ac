"""A layer that attends to images: what it adds to the tokens that it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi_trio.shard.torch_backend.layers.crossing import CrossAttention, Looks
from tgi_trio.shard.torch_backend.models.layer import Layer

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum of all ranks' parts


def cross(
    layer: Layer, crossing: CrossAttention, x: torch.Tensor, looks: Looks, reduce: Reduce
) -> torch.Tensor:
    """Return hidden states [T, hidden] behind a layer whose attention is `crossing`."""
    own = x if looks.tokens is None else x.index_select(0, looks.tokens)
    if layer.attention_norm is None or layer.mlp_norm is None or layer.mlp is None:
        raise ValueError("a layer that attends to images lacks parts")
    own = own + crossing.gate * reduce(crossing.attend(layer.attention_norm(own), looks))
    found = reduce(layer.mlp(layer.mlp_norm(own)))
    if looks.feeding is not None:
        found = found * looks.feeding
    own = own + crossing.mlp_gate * found
    return own if looks.tokens is None else x.index_copy(0, looks.tokens, own)
