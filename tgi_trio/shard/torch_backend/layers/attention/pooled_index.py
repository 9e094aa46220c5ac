"""A layer's index over blocks of tokens, which chooses those that a token attends to."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.torch_backend.layers.norm import Norm


class PooledIndex:
    """Computes keys, queries and scores of a layer's pooled index.

    Scores are not divided by their positive scale, which is the same for all and changes no choice.
    """

    __slots__ = ("key_norm", "number", "query_norm", "spec")

    def __init__(
        self, spec: PooledIndexSpec, *, query_norm: Norm, key_norm: Norm, number: int
    ) -> None:
        """`number`: of the layer of the KV cache that has the index keys."""
        self.spec = spec
        self.number = number
        self.query_norm = query_norm
        self.key_norm = key_norm

    @property
    def width(self) -> int:
        """The numbers of a token's projection: its queries, then its key."""
        return (self.spec.heads + 1) * self.spec.dim

    def queries(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, dim], and keys [T, 1, dim] that are neither normalised nor
        rotated, of a `projected` [T, width]; queries are normalised.
        """
        heads = projected.unflatten(-1, (-1, self.spec.dim))
        queries, keys = heads.split((self.spec.heads, 1), dim=1)
        return self.query_norm(queries), keys

    def join(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the keys [B, 1, dim] of blocks, not yet rotated, for tokens' [B, size, dim]."""
        mean = keys.float().mean(dim=1, keepdim=True).to(keys.dtype)
        return self.key_norm(mean)

    def nbytes(self) -> int:
        return self.query_norm.nbytes() + self.key_norm.nbytes()


def score_pooled(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores [..., T, B] of `keys` [..., B, dim] for queries [..., T, heads, dim]."""
    products = torch.matmul(queries, keys.transpose(-1, -2).unsqueeze(-3))
    return functional.relu(products).sum(dim=-2)
