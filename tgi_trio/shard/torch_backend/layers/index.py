"""The index of a layer: which of the tokens before it a token attends to (`IndexSpec`).

What is positive and the same for all tokens, the scale of the scores, is left out: it changes no
choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.spec import IndexSpec
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.rotary import Rotary, RotaryTable


class IndexQueries(NamedTuple):
    """What the tokens of a step ask of the index, float32."""

    queries: torch.Tensor  # [T, heads, dim], turned
    weights: torch.Tensor  # [T, heads]


class TokenIndex:
    """Keys and queries of a layer's index."""

    __slots__ = ("_key_norm", "_query_up", "rotary", "spec")

    def __init__(self, spec: IndexSpec, *, query_up: Linear, key_norm: Norm, rotary: int) -> None:
        """`rotary`: the number of what turns both."""
        self.spec = spec
        self.rotary = rotary
        self._query_up = query_up
        self._key_norm = key_norm

    def keys(self, projected: torch.Tensor, rotary: Rotary, table: RotaryTable) -> torch.Tensor:
        """Return [T, 1, dim] of `projected` [T, dim]."""
        return rotary.apply(self._key_norm(projected)[:, None], table.cos, table.sin)

    def ask(
        self,
        compressed: torch.Tensor,
        weights: torch.Tensor,
        rotary: Rotary,
        table: RotaryTable,
    ) -> IndexQueries:
        """Return the queries; `compressed` [T, query_rank] is normalised, `weights` [T, heads]."""
        queries = self._query_up(compressed).view(len(compressed), self.spec.heads, -1)
        return IndexQueries(rotary.apply(queries, table.cos, table.sin).float(), weights.float())

    def pack(self) -> None:
        self._query_up.pack()

    def nbytes(self) -> int:
        return self._query_up.nbytes() + self._key_norm.nbytes()


def score_keys(asked: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores [..., T, K] of `keys` [..., K, dim] for queries [..., T, heads, dim]."""
    queries, weights = asked
    products = torch.matmul(queries, keys.float().transpose(-1, -2).unsqueeze(-3))
    return torch.matmul(weights.unsqueeze(-2), functional.relu(products)).squeeze(-2)


def choose_best(scores: torch.Tensor, most: int) -> torch.Tensor:
    """Return int64 [N, most], in order: which of `scores` [N, K >= most] are best.

    Of the same score the first is taken, so that what is beyond a token's reach (-inf, and behind
    everything else) changes no choice. NaN is the worst: it fails its own row, and no other.
    """
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    least = scores.topk(most, dim=-1).values[:, -1:]
    better, same = scores > least, scores == least
    room = most - better.sum(dim=-1, keepdim=True)
    chosen = better | (same & (same.cumsum(dim=-1) <= room))
    return chosen.nonzero()[:, 1].view(len(scores), most)
