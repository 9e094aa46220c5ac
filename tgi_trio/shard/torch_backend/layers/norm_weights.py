"""What kernels need to know of a norm; `norm.py` has the norms, which these kernels compute too."""

from __future__ import annotations

from typing import Protocol

import torch

from tgi_trio.model.specs.decoder import NormKind


class NormWeights(Protocol):
    """A norm over the last dimension; see `Norm`."""

    kind: NormKind
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        ...
