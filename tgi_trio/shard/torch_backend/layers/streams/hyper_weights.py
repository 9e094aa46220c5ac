"""What the weights of a token's hidden states are computed from, all in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class HyperWeights:
    """Computes the weights of a token's hidden states from all of them."""

    mix: torch.Tensor  # [weights, count * hidden]
    base: torch.Tensor  # [weights]
    scale: torch.Tensor  # [kinds of weights]
    eps: float  # of the norm before the mixture
    invariant: bool = False  # see `batch_invariance.py`

    def of(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the weights [T, weights] of `streams` [T, count, hidden], not scaled yet."""
        flat = streams.flatten(1).float()
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return functional.linear(flat, self.mix)

    def nbytes(self) -> int:
        return self.mix.nbytes + self.base.nbytes + self.scale.nbytes
