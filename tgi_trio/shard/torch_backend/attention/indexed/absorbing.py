"""Queries over latents, made beside the scores of an index: both need the same queries alone.

A kernel of ours multiplies for few tokens, where a matrix is read as fast as by a library. Imported
only where Triton is installed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections

MOST_TOKENS: Final = 128  # with more, the matrices are read too often


class AbsorbingTile(NamedTuple):
    """The tile of a program of four warps; its sizes are powers of two."""

    rows: int
    outputs: int
    depth: int = 64


_HALF: Final = AbsorbingTile(64, 64)
_WIDE: Final = AbsorbingTile(32, 32, depth=32)  # float32 does not use the tensor cores


class AbsorbingPrograms(NamedTuple):
    """What programs are told that absorb, behind those that score."""

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def absorbing_constants(dtype: torch.dtype, heads: int, plain: int, rank: int) -> dict[str, int]:
    """Return constants of `score_and_absorb` for heads of queries of `plain` numbers."""
    tile = _HALF if dtype.itemsize <= 2 else _WIDE
    shape = {"ABSORBED_HEADS": heads, "PLAIN": plain, "RANK": rank}
    return shape | {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "DEPTH": tile.depth}


class PendingQueries:
    """Queries over latents of expanded ones, computed where they are asked for or before."""

    def __init__(self, latent: LatentProjections, expanded: torch.Tensor) -> None:
        """`expanded` [T, heads * size]: neither scaled nor rotated yet."""
        spec, heads = latent.spec, len(latent.key_up)
        query = expanded.view(len(expanded), heads, spec.plain_dim + spec.rotary_dim)
        self._plain, self.ends = query.split((spec.plain_dim, spec.rotary_dim), dim=-1)
        self._latent = latent
        self._found: torch.Tensor | None = None

    @property
    def joins(self) -> bool:
        """Whether the kernel that scores can have programs that absorb, however many tokens."""
        contiguous = self._plain.stride(-1) == 1 and self._latent.key_up.is_contiguous()
        return contiguous and not self._latent.invariant

    def take(self) -> AbsorbingPrograms:
        """Return programs that compute the queries; none of many tokens, nor if others did."""
        (tokens, heads, plain), rank = self._plain.shape, self._latent.key_up.shape[2]
        constants = absorbing_constants(self._plain.dtype, heads, plain, rank)
        own = (self._latent.key_up, tokens, *self._plain.stride()[:2])
        if self._found is not None or tokens > MOST_TOKENS:
            return AbsorbingPrograms(0, (self._plain, self._plain, *own), constants)
        self._found = self._plain.new_empty(tokens, heads, rank)
        programs = heads * -(-rank // constants["OUTPUTS"]) * -(-tokens // constants["ROWS"])
        return AbsorbingPrograms(programs, (self._found, self._plain, *own), constants)

    def settle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries over latents [T, heads, rank], and their ends [T, heads, rotary_dim]."""
        if self._found is None:
            return self._latent.absorb(self._plain), self.ends
        self._latent.change_queries(self._plain, self._found)
        return self._found, self.ends
