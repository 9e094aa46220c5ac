"""Several hidden states for each token, of which a layer computes one: Alternating Updates.

Sources: Baykal et al. 2023; transformers' Gemma 3n ("AltUp", "Laurel").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tgi_trio.model.specs.decoder import StreamsSpec
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm

_LEAST = 1e-5  # least mean square whose root is divided by


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """The projections before the first layer and after the last."""

    into: Sequence[Linear]
    out: Sequence[Linear]

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Return the streams [count, T, hidden] of `x` [T, hidden], which is the first of them."""
        return torch.stack([x, *(_as_large(linear(x), x) for linear in self.into)])

    def join(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the mean [T, hidden] of the projected `streams` [count, T, hidden]."""
        first = streams[0]
        pairs = zip(self.out, streams[1:], strict=True)
        others = (_as_large(linear(stream), first) for linear, stream in pairs)
        return torch.stack([first, *others]).mean(dim=0)

    def nbytes(self) -> int:
        return sum(linear.nbytes() for linear in (*self.into, *self.out))


@dataclass(frozen=True, slots=True, eq=False)
class LayerStreams:
    """A layer's part."""

    spec: StreamsSpec
    router_norm: Norm
    router: Linear
    prediction: Linear
    correction: Linear
    scale: torch.Tensor  # [hidden]
    detour_down: Linear
    detour_up: Linear
    detour_norm: Norm

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """Return a prediction of `streams` [count, T, hidden] after the layer."""
        weights = self.prediction(self._routes(streams[self.spec.active]))
        weights = weights.unflatten(-1, (self.spec.count, -1)).transpose(1, 2)
        return torch.matmul(streams.permute(1, 2, 0), weights).permute(2, 0, 1) + streams

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return `predicted` [count, T, hidden], corrected by the stream that was `computed`."""
        weights = self.correction(self._routes(computed)) + 1.0
        missed = computed - predicted[self.spec.active]
        return missed * weights.t().unsqueeze(-1) + predicted

    def detour(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, hidden] plus a low-rank addition to it (Laurel)."""
        return x + self.detour_norm(self.detour_up(self.detour_down(x)))

    def shown(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the input [T, hidden] of the layer's own embeddings."""
        active = streams[self.spec.active]
        return active * self.scale if self.spec.scaled else active

    def pack(self) -> None:
        for linear in (self.detour_down, self.detour_up):
            linear.pack()

    def nbytes(self) -> int:
        linears = (self.router, self.prediction, self.correction, self.detour_down, self.detour_up)
        norms = self.router_norm.nbytes() + self.detour_norm.nbytes() + self.scale.nbytes
        return norms + sum(linear.nbytes() for linear in linears)

    def _routes(self, x: torch.Tensor) -> torch.Tensor:
        """Return routing weights [T, count] between -1 and 1."""
        return torch.tanh(self.router(self.router_norm(x) / x.shape[-1]).float()).to(x.dtype)


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `x` [T, hidden] with each row's root mean square made that of `like`."""
    wanted = like.square().mean(dim=-1, keepdim=True).sqrt()
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST).sqrt()
    return x * wanted / own
