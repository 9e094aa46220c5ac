"""Loads the feed-forward part of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

import torch

from tgi_trio.shard.layers.activation import activation
from tgi_trio.shard.layers.linear import Linear
from tgi_trio.shard.layers.mlp import DenseMlp, ExpertsMlp, Mlp
from tgi_trio.shard.models.parts import Parts, joined
from tgi_trio.shard.models.specs import ExpertsSpec, LayerSpec

_SHARED = ("gate_proj", "up_proj", "down_proj")


def load_mlp(parts: Parts, prefix: str, layer: LayerSpec) -> Mlp:
    """Return what follows attention in the layer whose tensors' names begin with `prefix`."""
    if layer.experts is not None:
        return _experts(parts, prefix, layer.experts)
    spec, names, width = parts.spec, parts.names, parts.spec.mlp_width
    columns = parts.source.share(width, "MLP columns")
    if names.gate_up:
        both = parts.source.matrix(f"{prefix}{names.gate_up}.weight", (2 * width, spec.hidden_size))
        gate, up = both.chunk(2)
        inner = Linear(torch.cat((gate[columns], up[columns])))
    else:
        wanted = [names.gate, names.up] if spec.gated else [names.up]
        inner = joined(
            [parts.column_linear(prefix + name, width, columns, spec.mlp_bias) for name in wanted]
        )
    down = parts.row_linear(prefix + names.down, width, columns, spec.mlp_bias)
    return DenseMlp(inner, down, activation(spec.activation), spec.gated)


def _experts(parts: Parts, prefix: str, spec: ExpertsSpec) -> ExpertsMlp:
    names, source, hidden = parts.names, parts.source, parts.spec.hidden_size
    shared = shared_router = router_bias = None
    if spec.shared_width:
        shared = _expert(parts, prefix + names.shared_expert, _SHARED, spec.shared_width)
        if names.shared_router:
            shared_router = Linear(
                source.matrix(f"{prefix}{names.shared_router}.weight", (1, hidden))
            )
    router = source.matrix(f"{prefix}{names.router}.weight", (spec.count, hidden))
    if spec.routing in ("grouped-softmax", "grouped-sigmoid"):
        router = router.float()  # DeepSeek computes odds in float32 throughout
    if names.router_bias:
        router_bias = source.vector(prefix + names.router_bias, spec.count, dtype=torch.float32)
    own = (names.expert_gate, names.expert_up, names.expert_down)
    return ExpertsMlp(
        spec,
        router=Linear(router),
        router_bias=router_bias,
        experts=[
            _stacked_expert(parts, prefix + names.experts, own, spec, i)
            if spec.stacked
            else _expert(parts, prefix + names.experts.format(i), own, spec.width)
            for i in range(spec.count)
        ],
        shared=shared,
        shared_router=shared_router,
    )


def _expert(parts: Parts, place: str, names: tuple[str, str, str], width: int) -> DenseMlp:
    """Return the expert whose gate, up and down, by their `names`, lie at `place`."""
    columns = parts.source.share(width, "MLP columns")
    gate, up, down = (place + name for name in names)
    inner = joined([parts.column_linear(name, width, columns, False) for name in (gate, up)])
    outer = parts.row_linear(down, width, columns, False)
    return DenseMlp(inner, outer, activation(parts.spec.activation), gated=True)


def _stacked_expert(
    parts: Parts, place: str, names: tuple[str, str, str], spec: ExpertsSpec, index: int
) -> DenseMlp:
    """Return one expert out of matrices [experts * width, hidden] that hold them all (DBRX)."""
    shape = (spec.count * spec.width, parts.spec.hidden_size)
    columns = parts.source.share(spec.width, "MLP columns")
    first = index * spec.width
    rows = slice(first + columns.start, first + columns.stop)
    gate, up, down = (parts.source.matrix(place + name, shape, rows=rows) for name in names)
    inner, outer = Linear(torch.cat((gate, up))), Linear(down.t().contiguous())
    return DenseMlp(inner, outer, activation(parts.spec.activation), gated=True)
