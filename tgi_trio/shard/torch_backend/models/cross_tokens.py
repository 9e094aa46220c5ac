"""Cross-attention layers in a step: which tokens they compute, and what they add to them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.layers.attention.cross_attention import (
    CrossAttention,
    CrossTokens,
    GroupedCrossTokens,
)
from tgi_trio.shard.torch_backend.models.layer import Layer
from tgi_trio.shard.torch_backend.step_features import StepFeatures

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum of all ranks' parts


def cross(
    layer: Layer,
    cross_attention: CrossAttention,
    x: torch.Tensor,
    cross_tokens: CrossTokens,
    reduce: Reduce,
) -> torch.Tensor:
    """Return the output [T, hidden] of a layer whose attention is `cross_attention`."""
    own = cross_tokens.pick(x)
    if layer.attention_norm is None or layer.mlp_norm is None or layer.mlp is None:
        raise ValueError("a layer that attends to images lacks parts")
    attended = reduce(cross_attention.attend(layer.attention_norm(own), cross_tokens))
    own = own + cross_attention.gate * cross_tokens.show(attended)
    found = reduce(layer.mlp(layer.mlp_norm(own)))
    return cross_tokens.place(x, own + cross_attention.mlp_gate * cross_tokens.feed(found))


def find_cross_tokens(
    spec: DecoderSpec, features: StepFeatures | None, like: torch.Tensor
) -> CrossTokens | None:
    """Return the tokens of a step that cross-attention layers compute; None without such layers.

    `like` [T, hidden]: the first layer's input.
    """
    cross_attention = next(
        (layer.cross_attention for layer in spec.layers if layer.cross_attention), None
    )
    if cross_attention is None:
        return None
    if features is not None and features.cross_tokens is not None:
        cross_tokens: CrossTokens = features.cross_tokens.cast(like.dtype)
        return cross_tokens
    return GroupedCrossTokens.of(cross_attention, () if features is None else features.seeing, like)
