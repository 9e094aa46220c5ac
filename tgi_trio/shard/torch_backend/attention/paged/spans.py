"""Split-KV at fixed positions (spans), where batch invariance is kept.

Imported only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.spans_kernel import merge_spans
from tgi_trio.shard.torch_backend.attention.paged.tiles import MOST_PARTS, pad_dim
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.opening import open_values

SPAN: Final = 512  # keys; a multiple of the keys of any tile's step
# Programs share a tile's spans while there are fewer than these: results do not depend on it.
_PROGRAMS: Final = 512
_MOST_ROOM: Final = 1 << 26  # bytes of what they store


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the programs of a step's tiles write what they find; see `attend_spans`."""

    programs: int  # that share a tile
    count: int  # spans that a row may have
    out: torch.Tensor  # [T, heads, dim]
    sums: torch.Tensor  # float32 [T, heads, count, dim]; of one number where nothing is shared
    bests: torch.Tensor  # float32 [T, heads, count]
    masses: torch.Tensor
    bounds: torch.Tensor  # int32 [T, heads, 2]
    sinks: torch.Tensor | None  # float32 [heads]

    @property
    def room(self) -> tuple[torch.Tensor | int, ...]:
        """The first arguments of the kernels."""
        return self.out, self.sums, self.bests, self.masses, self.bounds, self.count

    @property
    def constants(self) -> dict[str, Any]:
        return {"DIVIDED": self.programs > 1, "SPAN": SPAN}

    def merge(self, gates: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, heads * dim] behind a launch, multiplied by the sigmoids of `gates`."""
        tokens, heads, dim = self.out.shape
        if self.programs > 1:
            merge_spans[(tokens * heads,)](
                *self.room[:-1],
                self.count,
                self.bests if self.sinks is None else self.sinks,
                HEADS=heads,
                DIM=dim,
                PADDED_DIM=pad_dim(dim),
                SINKS=self.sinks is not None,
                num_warps=2,
            )
        found = self.out.view(tokens, -1)
        return found if gates is None else open_values(found, gates)

    def hand_on(self, latent: LatentProjections) -> torch.Tensor:
        """Do what `merge` does: spans are merged in their order."""
        return self.merge()


def divide_into_spans(
    layer: AttentionLayer, query: torch.Tensor, tiles: int, dim: int, longest: int
) -> Spans:
    """Return room for the results, [T, heads, dim], of so many tiles of rows of `longest` keys."""
    tokens, heads = query.shape[:2]
    count = -(-longest // SPAN)
    programs = min(count, _PROGRAMS // max(1, tiles * layer.kv_heads), MOST_PARTS)
    if programs < 2 or tokens * heads * count * dim * 4 > _MOST_ROOM:
        programs = 1
    space = (tokens, heads, count) if programs > 1 else (1, 1, 1)
    bests = torch.empty(space, dtype=torch.float32, device=query.device)
    return Spans(
        programs,
        count,
        torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device),
        torch.empty((*space, dim), dtype=torch.float32, device=query.device),
        bests,
        torch.empty_like(bests),
        torch.empty((*space[:2], 2), dtype=torch.int32, device=query.device),
        layer.sinks,
    )
