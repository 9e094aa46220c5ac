"""Attention of all heads to one key per token, which is its value as well (`SharedKeySpec`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tgi_trio.model.specs.decoder import CompressionSpec
from tgi_trio.shard.torch_backend.layers.attention.compressor import Compressor
from tgi_trio.shard.torch_backend.layers.attention.index import IndexQueries
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.joined import JoinedLinears
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_by_head
from tgi_trio.shard.torch_backend.layers.norm import Norm


@dataclass(frozen=True, slots=True, eq=False)
class EntryIndex:
    """A layer's index, which selects among entries by entries of its own."""

    heads: int
    query_up: Linear
    compressor: Compressor
    # Of what expands the layer's compressed queries, and `query_up`.
    joined: JoinedLinears | None = None

    def ask(
        self, compressed: torch.Tensor, weights: torch.Tensor, turn: Rotary, table: RotaryTable
    ) -> IndexQueries:
        """Return the queries; `compressed` [T, query_rank] is normalised; `weights` [T, heads]."""
        queries = self.query_up(compressed).view(len(compressed), self.heads, -1)
        queries = turn.apply_last(queries, table.cos, table.sin)
        return IndexQueries(queries.float(), weights.float())


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What makes a layer's entries and selects among them."""

    spec: CompressionSpec
    compressor: Compressor
    index: EntryIndex | None

    def compressors(self) -> list[Compressor]:
        """Return what reads the numbers that are kept of a token, in their order."""
        return [self.compressor, *([] if self.index is None else [self.index.compressor])]


class Sizes(NamedTuple):
    """The numbers of a token that the first projection yields, in their order."""

    query: int  # compressed queries
    key: int
    kept: int  # for entries
    heads: int  # weights of an index's heads


class SharedKeyInputs(NamedTuple):
    """What a layer's attention is asked for a step's tokens, and what it is to keep of them."""

    query: torch.Tensor  # [T, heads, dim], rotated
    kept: torch.Tensor  # [T, 1, numbers]: the rotated key, then what entries are made of
    of_index: IndexQueries | None  # None: there is none


class SharedKey:
    """The parts of a layer around attention to one key per token, on one rank."""

    __slots__ = (
        *("dim", "entries", "eps", "invariant", "key_norm", "output_down", "query_norm"),
        "query_up",
    )

    def __init__(
        self,
        *,
        dim: int,
        eps: float,
        query_norm: Norm,
        query_up: Linear,
        key_norm: Norm,
        output_down: torch.Tensor,
        entries: Entries | None,
        invariant: bool = False,
    ) -> None:
        """`dim`, `eps`: of a head and its norm; `output_down`: [groups, rank, inputs].

        `invariant`: see `batch_invariance.py`.
        """
        self.dim = dim
        self.eps = eps
        self.query_norm = query_norm
        self.query_up = query_up
        self.key_norm = key_norm
        self.output_down = output_down
        self.entries = entries
        self.invariant = invariant

    def sizes(self, outputs: int) -> Sizes:
        """Return the parts of the first projection, which has so many outputs."""
        rank, index = self.query_norm.shape[0], self.entries.index if self.entries else None
        heads = index.heads if index else 0
        return Sizes(rank, self.dim, outputs - rank - self.dim - heads, heads)

    def ask(self, projected: torch.Tensor, turn: Rotary, table: RotaryTable) -> SharedKeyInputs:
        """Return what follows from the first projection [T, outputs]."""
        sizes = self.sizes(projected.shape[-1])
        compressed, key, kept, weights = projected.split(sizes, dim=-1)
        compressed = self.query_norm(compressed)
        key = turn.apply_last(self.key_norm(key)[:, None], table.cos, table.sin)
        query = turn.apply_last(self.queries(compressed), table.cos, table.sin)
        index = self.entries.index if self.entries else None
        index_queries = None if index is None else index.ask(compressed, weights, turn, table)
        return SharedKeyInputs(query, torch.cat((key, kept[:, None]), dim=-1), index_queries)

    def queries(self, compressed: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads, dim], not rotated yet, of normalised ones [T, query_rank]."""
        queries = self.query_up(compressed).view(len(compressed), -1, self.dim)
        square = queries.float().square().mean(-1, keepdim=True)
        return queries * torch.rsqrt(square + self.eps).to(queries.dtype)

    def group(self, attended: torch.Tensor) -> torch.Tensor:
        """Return [T, groups * rank] of the heads' results [T, heads, dim]."""
        by_group = attended.reshape(len(attended), len(self.output_down), -1)
        matrices = self.output_down.transpose(1, 2)
        return multiply_by_head(by_group, matrices, invariant=self.invariant).flatten(1)

    def pack(self) -> None:
        self.query_up.pack()
        if self.entries is not None and self.entries.index is not None:
            self.entries.index.query_up.pack()
            if self.entries.index.joined is not None:
                self.entries.index.joined.pack()

    def nbytes(self) -> int:
        parts = [self.query_norm.nbytes(), self.query_up.nbytes(), self.key_norm.nbytes()]
        if self.entries is not None:
            parts += [each.nbytes() for each in self.entries.compressors()]
            if self.entries.index is not None:
                parts.append(self.entries.index.query_up.nbytes())
        return sum(parts) + self.output_down.nbytes
