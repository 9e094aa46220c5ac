"""Several hidden states of a token, gated before each part of a layer; see `GatedStreamsSpec`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tgi_trio.model.spec import NormKind
from tgi_trio.shard.torch_backend.layers.linear import Linear


class StreamNorm:
    """Normalises each of a token's hidden states by itself, with weights of its own."""

    def __init__(self, kind: NormKind, weight: torch.Tensor, eps: float, count: int) -> None:
        """`kind`: one of RMSNorm; `weight` [count * hidden]."""
        self._weight = weight.float() + (1.0 if kind == "rms_plus_one" else 0.0)
        self._eps = eps
        self._count = count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, count * hidden], normalised."""
        apart = x.float().unflatten(-1, (self._count, -1))
        normed = functional.rms_norm(apart, apart.shape[-1:], None, self._eps).flatten(-2)
        return (normed * self._weight).to(x.dtype)

    def nbytes(self) -> int:
        return self._weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StreamGates:
    """The gates before attention or MLP of a layer, or before the head."""

    count: int
    rank: int
    norm: StreamNorm
    inner: Linear
    gates: Linear

    def mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is read of hidden states [T, count * hidden], and factors for `add`.

        [T, hidden], and [T, count], or [T, 0] where nothing is added.
        """
        normed = self.norm(streams)
        narrow, factors = self.inner(normed).tensor_split((self.rank,), dim=-1)
        opened = self.gates(functional.silu(narrow / self.count)).sigmoid()
        mixed = (opened * normed).unflatten(-1, (self.count, -1)).mean(dim=-2)
        return mixed, 2.0 * torch.sigmoid(factors / self.count)

    def add(self, streams: torch.Tensor, said: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, count * hidden] after `said` [T, hidden] was added to each."""
        return streams + (said.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2)

    def pack(self) -> None:
        self.inner.pack()
        self.gates.pack()

    def nbytes(self) -> int:
        return self.norm.nbytes() + self.inner.nbytes() + self.gates.nbytes()


@dataclass(frozen=True, slots=True, eq=False)
class LayerGates:
    """The gates of a layer."""

    attention: StreamGates
    mlp: StreamGates

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def nbytes(self) -> int:
        return self.attention.nbytes() + self.mlp.nbytes()
