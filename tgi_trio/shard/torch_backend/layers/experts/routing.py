"""Routing of a mixture of experts: from router logits to the chosen experts and their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import ExpertsSpec, Routing
from tgi_trio.shard.torch_backend.layers.activation import soft_cap

# float32 [T, per_token] weights and int64 [T, per_token] experts.
ChosenExperts = tuple[torch.Tensor, torch.Tensor]
Router = Callable[[torch.Tensor, ExpertsSpec, torch.Tensor | None], ChosenExperts]


def route(logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None) -> ChosenExperts:
    """Return each token's weights and experts, by the method of the model family (`spec`).

    `logits`: [T, experts]; `bias`: float32 [experts], for "biased-softmax", both sigmoids and
    "sqrt-softplus".
    """
    logits = logits.float()
    if spec.logit_cap:
        logits = soft_cap(logits, spec.logit_cap)
    return _ROUTERS[spec.routing](logits, spec, bias)


def _softmax(logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None) -> ChosenExperts:
    """The most probable experts (Mixtral, Jiang et al. 2024)."""
    weights, chosen = logits.softmax(dim=-1).topk(spec.per_token, dim=-1)
    if spec.normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def _biased_softmax(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None
) -> ChosenExperts:
    """The most probable experts, `bias` added for the choice alone (ERNIE 4.5, 2025)."""
    odds = logits.softmax(dim=-1)
    scores = odds if bias is None else odds + bias
    chosen = scores.topk(spec.per_token, dim=-1).indices
    weights = odds.gather(-1, chosen)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all may be zero
    return weights * spec.scale, chosen


def _sparse_mixer(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None
) -> ChosenExperts:
    """The best experts, one after another (Phi-3.5-MoE; Liu et al. 2024, arXiv 2409.12136).

    Each one's weight is its share of a softmax over itself and the experts close behind it.
    """
    weights, chosen = [], []
    left = logits
    for _ in range(spec.per_token):
        best, index = left.max(dim=-1, keepdim=True)
        size = torch.maximum(logits.abs(), best)
        behind = (best - logits) / size > 2 * spec.jitter
        odds = left.masked_fill(behind, float("-inf")).softmax(dim=-1)
        weights.append(odds.gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def _grouped_softmax(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None
) -> ChosenExperts:
    """The most probable experts of the groups whose best expert is most probable (DeepSeek-V2)."""
    odds = logits.softmax(dim=-1)
    best = odds.unflatten(-1, (spec.groups, -1)).amax(dim=-1)
    weights, chosen = _of_best_groups(odds, best, spec, 0.0).topk(spec.per_token, dim=-1)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all may be zero
    return weights * spec.scale, chosen


def _grouped_sigmoid(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None
) -> ChosenExperts:
    """The best experts of the groups whose two best add up to most (DeepSeek-V3).

    `bias`, which keeps the experts equally busy, counts for the choice but not for the weights.
    """
    odds = logits.sigmoid()
    scores = odds if bias is None else odds + bias
    best = scores.unflatten(-1, (spec.groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
    allowed = _of_best_groups(scores, best, spec, float("-inf"))
    chosen = allowed.topk(spec.per_token, dim=-1).indices
    weights = odds.gather(-1, chosen)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all may be zero
    return weights * spec.scale, chosen


def _sigmoid(logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None) -> ChosenExperts:
    """The best experts, each weighted by the sigmoid of its own logit (Llama 4, Meta 2025).

    `bias` is added to the logits for the choice alone (Kolibri, Aleph Alpha 2026).
    """
    scores = logits if bias is None else logits + bias
    chosen = scores.topk(spec.per_token, dim=-1).indices
    weights = logits.gather(-1, chosen).sigmoid()
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all may be zero
    return weights * spec.scale, chosen


def _sqrt_softplus(
    logits: torch.Tensor, spec: ExpertsSpec, bias: torch.Tensor | None
) -> ChosenExperts:
    """The best experts by the square root of softplus (DeepSeek-V4), `bias` as for V3."""
    odds = functional.softplus(logits).sqrt()
    scores = odds if bias is None else odds + bias
    chosen = scores.topk(spec.per_token, dim=-1).indices
    return _share(odds.gather(-1, chosen), spec), chosen


def weigh(logits: torch.Tensor, spec: ExpertsSpec, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights [T, per_token] of experts that tokens have, whatever their logits are.

    By "sqrt-softplus"; `logits`: [T, experts], `chosen`: int64 [T, per_token].
    """
    return _share(functional.softplus(logits.float()).sqrt().gather(-1, chosen), spec)


def _share(odds: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """Return the weights of chosen experts, [T, per_token], of which these are the odds."""
    if spec.normalise:
        odds = odds / (odds.sum(dim=-1, keepdim=True) + 1e-20)  # all may be zero
    return odds * spec.scale


def _of_best_groups(
    scores: torch.Tensor, best: torch.Tensor, spec: ExpertsSpec, other: float
) -> torch.Tensor:
    """Return `scores` [T, experts], `other` outside the best groups by `best` [T, groups]."""
    used = best.topk(spec.groups_used, dim=-1).indices
    barred = torch.ones_like(best, dtype=torch.bool).scatter(-1, used, False)
    return scores.masked_fill(barred.repeat_interleave(spec.count // spec.groups, dim=-1), other)


_ROUTERS: dict[Routing, Router] = {
    "softmax": _softmax,
    "biased-softmax": _biased_softmax,
    "sparse-mixer": _sparse_mixer,
    "grouped-softmax": _grouped_softmax,
    "grouped-sigmoid": _grouped_sigmoid,
    "sigmoid": _sigmoid,
    "sqrt-softplus": _sqrt_softplus,
}
