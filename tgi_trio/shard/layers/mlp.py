"""Feed-forward parts of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

from typing import Protocol

import torch

from tgi_trio.shard.layers.activation import Activation
from tgi_trio.shard.layers.linear import Linear


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to [T, hidden]."""
        ...

    def pack(self) -> None: ...

    def nbytes(self) -> int: ...


class DenseMlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) when `gated` is False."""

    __slots__ = ("act", "down", "gated", "up")

    def __init__(self, up: Linear, down: Linear, act: Activation, gated: bool) -> None:
        self.up = up  # gate rows first, then up rows, when gated
        self.down = down
        self.act = act
        self.gated = gated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        return self.down(self.act(inner))

    def pack(self) -> None:
        self.up.pack()
        self.down.pack()

    def nbytes(self) -> int:
        return self.up.nbytes() + self.down.nbytes()


class ExpertsMlp:
    """Each token goes through its `per_token` best experts, weighted by the router.

    Sources: Mixtral (Jiang et al. 2024), Qwen2-MoE for the shared expert behind a sigmoid gate.
    """

    __slots__ = ("experts", "normalise", "per_token", "router", "shared", "shared_router")

    def __init__(
        self,
        *,
        router: Linear,
        experts: list[DenseMlp],
        per_token: int,
        normalise: bool,
        shared: DenseMlp | None = None,
        shared_router: Linear | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.per_token = per_token
        self.normalise = normalise
        self.shared = shared
        self.shared_router = shared_router

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        odds = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = odds.topk(self.per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens, place = torch.where(chosen == index)
            part = self.experts[index](x[tokens]) * weights[tokens, place, None]
            out.index_add_(0, tokens, part)
        if self.shared is not None and self.shared_router is not None:
            out = out + torch.sigmoid(self.shared_router(x)) * self.shared(x)
        return out

    def pack(self) -> None:
        for part in (*self.experts, self.shared):
            if part is not None:
                part.pack()

    def nbytes(self) -> int:
        parts = [self.router, *self.experts, self.shared, self.shared_router]
        return sum(part.nbytes() for part in parts if part is not None)
