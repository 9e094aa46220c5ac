"""A mixture of experts beside a dense MLP, each with norms of its own (Gemma 4, Google 2026)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.shard.torch_backend.layers.mlp import ExpertsMlp
from tgi_trio.shard.torch_backend.layers.norm import Norm


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsBeside:
    """The experts, with the norms around them."""

    norm: Norm
    router_norm: Norm
    experts: ExpertsMlp
    dense_post_norm: Norm
    post_norm: Norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the experts' output [T, hidden] for `x` [T, hidden].

        `x` is also the input of the dense MLP, before its norm.
        """
        return self.experts(self.norm(x), routed_by=self.router_norm(x))

    def join(self, dense: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the sum of both outputs, normalised; [T, hidden] each, over all ranks."""
        return self.dense_post_norm(dense) + self.post_norm(output)

    def pack(self) -> None:
        self.experts.pack()

    def nbytes(self) -> int:
        norms = (self.norm, self.router_norm, self.dense_post_norm, self.post_norm)
        return self.experts.nbytes() + sum(norm.nbytes() for norm in norms)
