"""Normalisation layers."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import NormKind
from tgi_trio.shard.torch_backend.layers.residual import normalise
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.torch_device import runs_kernels


class Norm:
    """One normalisation over the last dimension.

    "rms": x / rms(x) * weight. "rms_plus_one": likewise with weight + 1 (Gemma), computed in
    float32, because 1 + w does not survive bfloat16. "layer": LayerNorm. "layer_plus_one":
    LayerNorm with weight + 1 (Nemotron).
    """

    __slots__ = ("bias", "eps", "invariant", "kind", "shape", "weight")

    def __init__(
        self,
        kind: NormKind,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        size: int,
        *,
        invariant: bool = False,
    ) -> None:
        """`invariant`: torch, which chooses by the number of rows, computes none on a device."""
        if kind == "rms_plus_one" and weight is not None:
            weight = weight.float() + 1.0
        if kind == "layer_plus_one":
            weight, kind = None if weight is None else weight + 1.0, "layer"
        self.kind: NormKind = kind
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.invariant = invariant
        self.shape = (size,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.invariant and runs_kernels(x.device):
            return normalise(x, self)
        if self.kind == "rms":
            return functional.rms_norm(x, self.shape, self.weight, self.eps)
        if self.kind == "layer":
            return functional.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        return functional.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)


class DividedNorm:
    """A norm over features that ranks divide among them: each returns its part of the result."""

    __slots__ = ("_norm", "_ranks")

    def __init__(self, norm: Norm, ranks: Gathering | None) -> None:
        """`norm`: over the parts of all ranks; `ranks` None: there are no others."""
        self._norm = norm
        self._ranks = ranks

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        if self._ranks is None:
            return self._norm(part)
        whole = self._norm(self._ranks.all_gather(part))
        return whole.chunk(self._ranks.size, dim=-1)[self._ranks.rank]

    def nbytes(self) -> int:
        return self._norm.nbytes()
