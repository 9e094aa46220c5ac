"""The end of a decoder's layer: its feed-forward part, and what some layers do after it."""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp, Mlp
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
    add_normalise_and_widen,
)
from tgi_trio.shard.torch_backend.models.cross_tokens import Reduce
from tgi_trio.shard.torch_backend.models.layer import Layer


def feed_forward(
    mlp: Mlp, layer: Layer, x: torch.Tensor, addends: Addends | None, reduce: Reduce | None
) -> tuple[torch.Tensor, torch.Tensor | ExpertParts]:
    """Return the sum of `x` [T, hidden] and `addends`, and the MLP's output for the sum's norm.

    Experts beside the MLP read the sum itself. `reduce` None: there are no other ranks.
    """
    norm, beside = layer.mlp_norm, layer.beside
    if layer.mlp_norm_gate is not None:
        x, inner = layer.mlp_norm_gate.add_and_open(x, addends, norm)
        if reduce is None and isinstance(mlp, ExpertsMlp):
            return x, mlp.find(inner, inner)
        found = mlp(inner)
        return x, found if reduce is None else reduce(found)
    if reduce is None and beside is None and isinstance(mlp, ExpertsMlp):
        if mlp.widens(len(x)):
            x, inner, wide = add_normalise_and_widen(x, addends, norm)
            return x, mlp.find(inner, wide)
        x, inner = add_and_normalise(x, addends, norm)
        return x, mlp.find(inner, inner)
    whole = reduce or _alone
    if isinstance(mlp, DenseMlp):
        x, found = mlp.add_and_feed(x, addends, norm)
        found = whole(found)
    else:
        x, inner = add_and_normalise(x, addends, norm)
        found = whole(mlp(inner))
    if beside is not None:
        found = beside.join(found, whole(beside(x)))
    return x, found


def feed_both(
    mlp: Mlp,
    later: ExpertsMlp,
    layer: Layer,
    x: torch.Tensor,
    addends: Addends | None,
    reduce: Reduce | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of `x` and `addends`, the MLP's output for the sum's norm, and experts'."""
    whole = reduce or _alone
    x, inner = add_and_normalise(x, addends, layer.mlp_norm)
    return x, whole(mlp(inner)), whole(later(inner))


def leave_layer(
    layer: Layer, x: torch.Tensor, addends: Addends | None, own: torch.Tensor | None
) -> tuple[torch.Tensor, Addends | None]:
    """Apply a layer's own embeddings and scale; return hidden states and what is still to be added.

    `own` [T, width]: the layer's own embeddings of the tokens, if it has such.
    """
    if layer.per_layer_input is not None and own is not None:
        x = add_and_normalise(x, addends, None)[0]
        addends = Addends(layer.per_layer_input(x, own), norm=layer.per_layer_input.post_norm)
    if layer.scale is None:
        return x, addends
    if addends is None:
        return x * layer.scale, None
    return x, addends._replace(factor=layer.scale)


def _alone(part: torch.Tensor) -> torch.Tensor:
    return part
