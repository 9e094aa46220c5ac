"""A layer's index, which selects the earlier tokens that a token attends to (`IndexSpec`).

Scores are not multiplied by their positive scale, which is the same for all and changes no choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from tgi_trio.model.specs.decoder import IndexSpec, LatentSpec
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.joined import JoinedLinears
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm


class IndexQueries(NamedTuple):
    """The index queries of a step's tokens, float32."""

    queries: torch.Tensor  # [T, heads, dim], rotated
    weights: torch.Tensor  # [T, heads]


class TokenIndex:
    """Computes keys and queries of a layer's index."""

    __slots__ = (
        *(
            "joined",
            "key_norm",
            "place",
            "pool_bias",
            "query_norm",
            "query_scale",
            "query_up",
            "rotary",
        ),
        "spec",
    )

    def __init__(
        self,
        spec: IndexSpec,
        *,
        query_up: Linear,
        key_norm: Norm,
        rotary: int,
        pool_bias: torch.Tensor | None = None,
        query_norm: Norm | None = None,
        query_scale: LogScale | None = None,
        place: int = 0,
        joined: JoinedLinears | None = None,
    ) -> None:
        """`rotary`: the number of the rotary embedding of both.

        `pool_bias`: float32 [pool, dim], added to tokens' weights in the mean of a run.
        `query_norm`: of what queries come from, if that is the layer's input. `place`: which of the
        index keys behind a latent in the cache is this one's. `joined`: that which compressed
        queries are expanded by, and `query_up`.
        """
        self.joined = joined
        self.spec = spec
        self.pool_bias = pool_bias
        self.rotary = rotary
        self.query_up = query_up
        self.query_norm = query_norm
        self.query_scale = query_scale
        self.key_norm = key_norm
        self.place = place

    @property
    def width(self) -> int:
        """The numbers that an index adds to a layer's projections of a token."""
        return self.spec.kept + self.spec.heads

    @property
    def begin(self) -> int:
        """The first of the dimensions that are rotated."""
        return self.spec.dim - self.spec.rotary.dim if self.spec.last else 0

    def place_in(self, latent: LatentSpec) -> slice:
        """Return where what is kept of a token lies in a row of the cache."""
        begin = latent.rank + latent.rotary_dim + self.place * self.spec.kept
        return slice(begin, begin + self.spec.kept)

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is before the index in `projected` [T, width], its key, and the weights of
        its heads; then, with a pool, the key's weights in the mean of a run.
        """
        spec = self.spec
        own = (spec.dim, spec.heads, *([spec.dim] if spec.pool else []))
        before = projected.shape[-1] - self.width
        parts: tuple[torch.Tensor, ...] = projected.split((before, *own), dim=-1)
        return parts

    def keys(self, projected: torch.Tensor, rotary: Rotary, table: RotaryTable) -> torch.Tensor:
        """Return index keys [T, 1, dim] of `projected` [T, dim]."""
        turn = rotary.apply_last if self.spec.last else rotary.apply
        return turn(self.key_norm(projected)[:, None], table.cos, table.sin)

    def project(self, source: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads, dim], neither scaled nor rotated yet.

        `source`: compressed queries [T, query_rank], normalised, or the layer's input [T, hidden],
        which is normalised here.
        """
        return self.multiply(source if self.query_norm is None else self.query_norm(source))

    def multiply(self, source: torch.Tensor) -> torch.Tensor:
        """Return queries of what has been normalised; see `project`."""
        return self.by_head(self.query_up(source))

    def by_head(self, queries: torch.Tensor) -> torch.Tensor:
        """Return `queries` [T, heads * dim] as [T, heads, dim]."""
        return queries.view(len(queries), self.spec.heads, -1)

    def ask(
        self,
        source: torch.Tensor,
        weights: torch.Tensor,
        rotary: Rotary,
        table: RotaryTable,
    ) -> IndexQueries:
        """Return the queries; `source` as for `project`; `weights` [T, heads]."""
        queries = self.project(source)
        if self.query_scale is not None:
            self.query_scale.multiply(queries, table.logs)
        turn = rotary.apply_last if self.spec.last else rotary.apply
        return IndexQueries(turn(queries, table.cos, table.sin).float(), weights.float())

    def pack(self) -> None:
        self.query_up.pack()
        if self.joined is not None:
            self.joined.pack()

    def nbytes(self) -> int:
        pool = 0 if self.pool_bias is None else self.pool_bias.nbytes
        parts = (self.query_up, self.key_norm, self.query_norm, self.query_scale)
        return pool + sum(part.nbytes() for part in parts if part is not None)


def score_keys(index_queries: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores [..., T, K] of `keys` [..., K, dim] for queries [..., T, heads, dim]."""
    queries, weights = index_queries
    products = torch.matmul(queries, keys.float().transpose(-1, -2).unsqueeze(-3))
    return torch.matmul(weights.unsqueeze(-2), functional.relu(products)).squeeze(-2)


def choose_best(scores: torch.Tensor, most: int) -> torch.Tensor:
    """Return int64 [N, most], ascending: the indices of the best of `scores` [N, K >= most].

    Among equal scores the first is taken, so that tokens out of reach (-inf, and last) change no
    choice. NaN counts as the worst: it spoils its own row and no other.
    """
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    least = scores.topk(most, dim=-1).values[:, -1:]
    better, same = scores > least, scores == least
    room = most - better.sum(dim=-1, keepdim=True)
    chosen = better | (same & (same.cumsum(dim=-1) <= room))
    # Not `nonzero`, whose size a device would have to tell the host; the last column is for others.
    places = torch.where(chosen, chosen.cumsum(dim=-1) - 1, most)
    numbers = torch.arange(scores.shape[1], device=scores.device).expand_as(places)
    return places.new_zeros((len(scores), most + 1)).scatter_(1, places, numbers)[:, :most]
