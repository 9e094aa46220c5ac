"""Loads the feed-forward part of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

import torch

from tgi_trio.model.matrices import ExpertsRefs, MlpRefs
from tgi_trio.model.spec import ExpertsSpec
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader


def load_dense_mlp(loader: WeightLoader, refs: MlpRefs, act: Activation) -> DenseMlp:
    """Return a dense MLP, or one expert."""
    return DenseMlp(loader.linear(refs.inner), loader.linear(refs.down), act, refs.gated)


def load_experts(
    loader: WeightLoader, refs: ExpertsRefs, spec: ExpertsSpec, act: Activation
) -> ExpertsMlp:
    """Return a mixture of experts."""
    router_bias = None
    router = loader.weight(refs.router)
    if spec.routing in ("grouped-softmax", "grouped-sigmoid"):
        router = router.float()  # DeepSeek computes odds in float32 throughout
    if refs.router_bias:
        router_bias = loader.source.vector(refs.router_bias, spec.count, dtype=torch.float32)
    return ExpertsMlp(
        spec,
        router=Linear(router),
        router_bias=router_bias,
        experts=[load_dense_mlp(loader, expert, act) for expert in refs.experts],
        shared=load_dense_mlp(loader, refs.shared, act) if refs.shared else None,
        shared_router=loader.linear(refs.shared_router) if refs.shared_router else None,
    )
