"""Layers of latents with an index, with random weights, for two backends to agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.shard.torch_backend.models_support import plan, sequence, tables
from tgi_trio.model.specs.decoder import IndexSpec, LatentSpec, RotarySpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm

HEADS, RANK, QUERY = 5, 24, 12


@dataclass
class Case:
    """One kind of index, and of what is around it."""

    pool: int = 0
    most: int = 8
    heads: int = 3  # of the index
    dim: int = 16  # of its keys
    rotary: int = 8  # of latents; 0: nothing is rotated
    interleaved: bool = True  # latents; an index has pairs half a head apart
    last: bool = False
    sinks: bool = False
    codes: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seeds: list[int] = field(default_factory=lambda: [0])

    def some(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return random numbers, other ones with each call."""
        self.seeds[0] += 1
        generator = torch.Generator().manual_seed(self.seeds[0])
        numbers = torch.randn(shape, generator=generator)
        return numbers.to(self.device, dtype or self.dtype)

    @property
    def spec(self) -> IndexSpec:
        turning = RotarySpec(self.rotary)
        return IndexSpec(
            self.heads, self.dim, self.most, turning, self.pool, self.last, norm_eps=1e-3
        )

    @property
    def width(self) -> int:
        """The numbers of a row of the cache."""
        return RANK + self.rotary + self.spec.kept

    def layer(self, number: int) -> AttentionLayer:
        """Return layer `number` of the cache, 0 or 1; the latter is the last over its choice."""
        sinks = self.some(HEADS, dtype=torch.float32) if self.sinks else None
        return AttentionLayer(
            *(number, HEADS, 1, self.width, 0.3),
            value_dim=RANK,
            most=self.most,
            chosen_last=number > 0,
            sinks=sinks,
        )

    def latent(self) -> LatentProjections:
        norms = (Norm("rms", self.some(n), None, 1e-6, n) for n in (QUERY, RANK))
        plain = 16
        return LatentProjections(
            LatentSpec(RANK, QUERY, plain, self.rotary, value_dim=16),
            query_norm=next(norms),
            query_up=Linear(self.some(HEADS * (plain + self.rotary), QUERY)),
            latent_norm=next(norms),
            key_up=self.some(HEADS, plain, RANK) / 4,
            value_up=self.some(HEADS, RANK, 16),
        )

    def index(self) -> TokenIndex:
        norm = Norm("layer", self.some(self.dim), self.some(self.dim), 1e-3, self.dim)
        bias = self.some(self.pool, self.dim, dtype=torch.float32) if self.pool else None
        return TokenIndex(
            self.spec,
            query_up=Linear(self.some(self.heads * self.dim, QUERY)),
            key_norm=norm,
            rotary=1,
            pool_bias=bias,
        )

    def turns(self, positions: torch.Tensor) -> list[tuple[Rotary, RotaryTable]]:
        """Return the rotary embeddings of latents and of their index."""
        where, at = torch.device(self.device), positions.to(self.device)
        specs = (RotarySpec(self.rotary, interleaved=self.interleaved), RotarySpec(self.rotary))
        rotaries = (Rotary(spec, where) for spec in specs)
        return [(each, each.table(at, at + 1, self.dtype)) for each in rotaries]

    def projected(self, tokens: int, *, indexed: bool = True) -> torch.Tensor:
        """Return what a layer projects of tokens, with its index or without one."""
        extra = self.spec.kept + self.heads if indexed else 0
        return self.some(tokens, QUERY + RANK + self.rotary + extra)

    def cache(self, blocks: int, layers: int = 1) -> KVCache:
        dtype: Any = getattr(torch, self.codes.replace("fp8", "float8")) if self.codes else None
        shape = KVShape(layers, 1, self.width, same=True)
        return KVCache(shape, blocks, dtype or self.dtype, torch.device(self.device))


def list_steps(contexts: list[int], counts: list[list[int]]) -> tuple[list[StepPlan], int]:
    """Return steps that compute so many tokens of each row, one after another, and the blocks.

    `contexts`: what the rows have in the end; a row that a step leaves out has a count of 0.
    """
    blocks = tables([[0] * n for n in contexts], shuffle=2, new=0)
    rows = [sequence(i, [3] * n, blocks[i], new=0) for i, n in enumerate(contexts)]
    steps = []
    for step in counts:
        some = [(row, n) for row, n in zip(rows, step, strict=True) if n]
        steps.append(plan([row for row, _ in some], [n for _, n in some]))
        for row, n in some:
            row.computed += n
    return steps, 1 + sum(map(len, blocks))
