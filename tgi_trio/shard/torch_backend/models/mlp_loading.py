"""Loads the feed-forward part of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import LinearRef, TensorRef, VectorRef
from tgi_trio.model.matrices.roles import BesideRefs, ExpertsRefs, MlpRefs
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.torch_backend.layers.activation import Activation, Xielu
from tgi_trio.shard.torch_backend.layers.beside import ExpertsBeside
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader


def load_dense_mlp(
    loader: WeightLoader,
    refs: MlpRefs,
    act: Activation | None,
    limit: float = 0.0,
    scale: float = 1.0,
    *,
    raised: bool = True,
    bounds_opened: bool = False,
) -> DenseMlp:
    """Return a dense MLP, or one expert; `act` None: a learned one; the rest as for `Gate`."""
    if act is None:
        parts = (loader.source.vector(part.name, part.size) for part in refs.learned)
        act = Xielu.of(*parts)
    if refs.gated:
        act = Gate(act, limit, refs.paired, scale, raised, bounds_opened)
    return DenseMlp(
        loader.linear(refs.inner),
        loader.linear(refs.down),
        act,
        loader.divided_norm(refs.inner_norm),
    )


def load_experts(
    loader: WeightLoader,
    refs: ExpertsRefs,
    spec: ExpertsSpec,
    act: Activation | None,
    scale: VectorRef | None = None,
) -> ExpertsMlp:
    """Return a mixture of experts; `scale`: multiplies each expert's routing weight."""
    choice_bias = None
    router = loader.weight(refs.router)
    if spec.routing not in ("softmax", "sparse-mixer"):
        router = router.float()  # DeepSeek, ERNIE, Flint compute odds in float32 throughout
    if refs.choice_bias is not None:
        choice_bias = loader.vector(refs.choice_bias)
    one = partial(
        load_dense_mlp, loader, act=act, raised=spec.raised, bounds_opened=spec.bounds_opened
    )
    shared_limit = spec.limit if spec.shared_limit is None else spec.shared_limit
    return ExpertsMlp(
        spec,
        router=Linear(router, loader.bias(refs.router), invariant=loader.source.invariant),
        choice_bias=choice_bias,
        experts=[one(expert, limit=spec.limit) for expert in refs.experts],
        shared=None if refs.shared is None else one(refs.shared, limit=shared_limit),
        shared_router=_load_shared_gate(loader, refs.shared_router) if refs.shared_router else None,
        expert_scale=loader.vector(scale) if scale else None,
        entry=loader.linear(refs.entry) if refs.entry else None,
        exit=loader.linear(refs.exit) if refs.exit else None,
        table=_load_table(loader, refs.table, spec) if refs.table else None,
        idles=loader.source.rank == 0,
        keeps_shared=loader.source.adapted,
    )


def _load_shared_gate(loader: WeightLoader, ref: LinearRef) -> Linear:
    """Return what opens the shared expert, which is never rounded, as routers are not."""
    return Linear(loader.weight(ref), loader.bias(ref), invariant=loader.source.invariant)


def _load_table(loader: WeightLoader, ref: TensorRef, spec: ExpertsSpec) -> torch.Tensor:
    """Return the experts of each token; raises ModelLoadError for those that there are not."""
    table = loader.source.table(ref.name, ref.shape)
    if not 0 <= int(table.min()) <= int(table.max()) < spec.count:
        raise ModelLoadError(
            f"Tensor {ref.name!r} has experts up to number {int(table.max())}, and there are "
            f"{spec.count}."
        )
    return table


def load_beside(
    loader: WeightLoader, refs: BesideRefs, spec: ExpertsSpec, act: Activation | None
) -> ExpertsBeside:
    """Return a mixture of experts beside an MLP."""
    router_norm = loader.norm(refs.router_norm)
    if router_norm.weight is not None:
        router_norm.weight = router_norm.weight * refs.router_norm.size**-0.5
    return ExpertsBeside(
        norm=loader.norm(refs.norm),
        router_norm=router_norm,
        experts=load_experts(loader, refs.experts, spec, act, refs.expert_scale),
        dense_post_norm=loader.norm(refs.dense_post_norm),
        post_norm=loader.norm(refs.post_norm),
    )
