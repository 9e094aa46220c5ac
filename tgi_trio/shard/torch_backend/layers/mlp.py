"""Feed-forward parts of a layer: one dense MLP, or a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from tgi_trio.model.spec import ExpertsSpec
from tgi_trio.shard.machine.accelerator import runs_kernels
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.routing import route
from tgi_trio.shard.torch_backend.torch_device import has_triton

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.layers.grouped_experts import GroupedExperts


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, hidden] to [T, hidden]."""
        ...

    def pack(self) -> None: ...

    def nbytes(self) -> int: ...


class DenseMlp:
    """down(act(up(x))); where there is a gate, `up` has its rows as well and `act` is a `Gate`."""

    __slots__ = ("act", "down", "up")

    def __init__(self, up: Linear, down: Linear, act: Activation) -> None:
        self.up = up
        self.down = down
        self.act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))

    def pack(self) -> None:
        self.up.pack()
        self.down.pack()

    def nbytes(self) -> int:
        return self.up.nbytes() + self.down.nbytes()


class ExpertsMlp:
    """Each token goes through the experts that the router chooses, weighted.

    Sources: Mixtral (Jiang et al. 2024); Qwen2-MoE for the shared expert behind a sigmoid gate,
    DeepSeek-V2 for one without.
    """

    __slots__ = ("choice_bias", "experts", "grouped", "router", "shared", "shared_router", "spec")

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        router: Linear,
        experts: list[DenseMlp],
        choice_bias: torch.Tensor | None = None,
        shared: DenseMlp | None = None,
        shared_router: Linear | None = None,
    ) -> None:
        """`router`: its dtype is what odds are computed in; `choice_bias` as `route` wants it."""
        self.spec = spec
        self.router = router
        self.experts = experts
        self.choice_bias = choice_bias
        self.shared = shared
        self.shared_router = shared_router
        self.grouped: GroupedExperts | None = None  # what computes them on a device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x.to(self.router.weight.dtype))
        shared = None if self.shared is None else self.shared(x)
        doors = None if self.shared_router is None else self.shared_router(x)
        if self.grouped is not None:
            return self.grouped(x, logits, shared, doors)
        weights, chosen = route(logits, self.spec, self.choice_bias)
        out = self._one_by_one(x, weights.to(x.dtype), chosen)
        if shared is None:
            return out
        return out + (shared if doors is None else torch.sigmoid(doors) * shared)

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Add up the experts that were chosen by anybody."""
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens, place = torch.where(chosen == index)
            part = self.experts[index](x[tokens]) * weights[tokens, place, None]
            out.index_add_(0, tokens, part)
        return out

    def pack(self) -> None:
        for part in (*self.experts, self.shared):
            if part is not None:
                part.pack()
        self._group()

    def _group(self) -> None:
        """Lay the experts' weights out one behind the other, where that is how they are computed.

        The experts go on as views of it; nothing is held twice.
        """
        parts = [linear for expert in self.experts for linear in (expert.up, expert.down)]
        plain = all(type(linear) is Linear and linear.packed is None for linear in parts)
        if not plain or not runs_kernels(parts[0].weight.device) or not has_triton():
            return
        from tgi_trio.shard.torch_backend.layers.grouped_experts import GroupedExperts

        up, down = _stack(parts[0::2]), _stack(parts[1::2])
        self.grouped = GroupedExperts(self.spec, up, down, self.experts[0].act, self.choice_bias)

    def nbytes(self) -> int:
        parts = [self.router, *self.experts, self.shared, self.shared_router]
        return sum(part.nbytes() for part in parts if part is not None)


def _stack(linears: list[Linear]) -> Linear:
    """Return all weights [linears, out, in] and biases; the linears become views of the former."""
    every = torch.stack([linear.weight for linear in linears])
    for linear, own in zip(linears, every.unbind(0), strict=True):
        linear.weight = own
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(every, torch.stack(biases) if biases else None)
