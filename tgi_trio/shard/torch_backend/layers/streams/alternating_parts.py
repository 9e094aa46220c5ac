"""What layers pass on and route by that compute one of several hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.norm import Norm


class Added(NamedTuple):
    """What a layer's own embeddings add to all states but the first."""

    output: torch.Tensor  # [T, hidden], before its norm
    norm: Norm


class Routing(NamedTuple):
    """What makes routing weights of a hidden state."""

    norm: Norm
    router: torch.Tensor  # [count, hidden]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return routing weights [T, count] between -1 and 1 of `x` [T, hidden]."""
        routes = functional.linear(self.norm(x) / x.shape[-1], self.router)
        return torch.tanh(routes.float()).to(x.dtype)
