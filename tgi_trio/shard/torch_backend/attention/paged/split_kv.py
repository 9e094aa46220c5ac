"""Split-KV (flash-decoding): a tile's keys divided among programs, where a step has few tiles.

Imported only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.merging_kernel import merge_parts
from tgi_trio.shard.torch_backend.attention.paged.tiles import MOST_PARTS, pad_dim
from tgi_trio.shard.torch_backend.layers.attention.expanding import AttendedParts
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.torch_device import overlap

# A tile is divided (split-KV) while there are fewer programs: a few for each multiprocessor of a
# large device. On an H100 dividing paid up to there, and cost a little beyond.
_PROGRAMS = 512
_WIDE = 256  # numbers of a head, beyond which more warps merge its parts


@dataclass(frozen=True, slots=True)
class DividedTiles:
    """Over how many programs each tile of a step is divided, and where results go."""

    parts: int
    out: torch.Tensor  # [T, heads, dim]
    sums: torch.Tensor  # float32 [T, heads, parts, dim]; of one number where nothing is divided
    bests: torch.Tensor  # float32 [T, heads, parts]
    masses: torch.Tensor

    @property
    def programs(self) -> int:
        """That share a tile."""
        return self.parts

    @property
    def room(self) -> tuple[torch.Tensor, ...]:
        """The first arguments of the kernels."""
        return self.out, self.sums, self.bests, self.masses

    @property
    def constants(self) -> dict[str, Any]:
        return {"DIVIDED": self.parts > 1}

    def merge(self, gates: torch.Tensor | None = None) -> torch.Tensor:
        """Return [T, heads * dim] behind a launch.

        Where it was divided, results are multiplied here by the sigmoids of `gates`.
        """
        tokens, heads, dim = self.out.shape
        if self.parts > 1:
            opening, each = describe_gates(gates, self.out)
            merge_parts[(tokens * heads,)](
                self.out,
                self.sums,
                self.bests,
                self.masses,
                opening,
                self.parts,
                opening.stride(0),
                HEADS=heads,
                DIM=dim,
                PADDED_DIM=pad_dim(dim),
                MOST=MOST_PARTS,
                EACH=each,
                **overlap(self.out.device),
                num_warps=4 if dim > _WIDE else 2,
            )
        return self.out.view(len(self.out), -1)

    def hand_on(self, latent: LatentProjections) -> torch.Tensor | AttendedParts:
        """Return [T, heads * dim] behind a launch, or the parts of it, for `latent` to merge."""
        if latent.changed:
            return self.merge()
        if self.parts == 1:
            return self.out.view(len(self.out), -1)
        return AttendedParts(self.sums, self.bests, self.masses, self.out.dtype)


def describe_gates(gates: torch.Tensor | None, result: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what kernels read of gates [T, n] of `result` [T, heads, dim], and how many of its
    neighbouring numbers each of them opens; 0 if there are none.
    """
    if gates is None:
        return result, 0
    gates = gates if gates.stride(1) == 1 else gates.contiguous()
    return gates, result.shape[1] * result.shape[2] // gates.shape[1]


def divide_work(
    layer: AttentionLayer,
    query: torch.Tensor,
    tiles: int,
    dim: int,
) -> DividedTiles:
    """Return room for the results, [T, heads, dim], of so many tiles."""
    parts = count_parts(tiles * layer.kv_heads)
    tokens, heads = query.shape[:2]
    space = (tokens, heads, parts) if parts > 1 else (1, 1, 1)
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    bests = torch.empty(space, dtype=torch.float32, device=query.device)
    sums = torch.empty((*space, dim), dtype=torch.float32, device=query.device)
    return DividedTiles(parts, out, sums, bests, torch.empty_like(bests))


def count_parts(programs: int) -> int:
    """Return over how many programs each of `programs` is divided: a power of two."""
    more = max(1, _PROGRAMS // max(1, programs))
    return min(MOST_PARTS, 1 << (more.bit_length() - 1))
