"""Cross-attention layers in a step: which tokens they compute, and what they add to them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.torch_backend.layers.crossing import CrossAttention, Looks, Sight
from tgi_trio.shard.torch_backend.models.layer import Layer
from tgi_trio.shard.torch_backend.step_features import StepFeatures

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum of all ranks' parts


def cross(
    layer: Layer, crossing: CrossAttention, x: torch.Tensor, sight: Sight, reduce: Reduce
) -> torch.Tensor:
    """Return the output [T, hidden] of a layer whose attention is `crossing`."""
    own = sight.pick(x)
    if layer.attention_norm is None or layer.mlp_norm is None or layer.mlp is None:
        raise ValueError("a layer that attends to images lacks parts")
    attended = reduce(crossing.attend(layer.attention_norm(own), sight))
    own = own + crossing.gate * sight.show(attended)
    found = reduce(layer.mlp(layer.mlp_norm(own)))
    return sight.place(x, own + crossing.mlp_gate * sight.feed(found))


def look(spec: DecoderSpec, features: StepFeatures | None, like: torch.Tensor) -> Sight | None:
    """Return the tokens of a step that cross-attention layers compute; None without such layers.

    `like` [T, hidden]: the first layer's input.
    """
    crossing = next((layer.crosses for layer in spec.layers if layer.crosses), None)
    if crossing is None:
        return None
    if features is not None and features.sight is not None:
        sight: Sight = features.sight.cast(like.dtype)
        return sight
    return Looks.of(crossing, () if features is None else features.seeing, like)
