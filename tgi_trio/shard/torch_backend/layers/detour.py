"""The end of a low-rank detour around attention (Gemma 3n's "Laurel")."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads, HeadLaunch
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels


class ExpansionTile(NamedTuple):
    """The tile of a program; its sizes are powers of two."""

    tokens: int
    outputs: int


_FEW: Final = ExpansionTile(16, 64)
_MANY: Final = ExpansionTile(64, 64)  # reads the matrix a quarter as often
_FEW_TOKENS: Final = 256
_DEPTH: Final = 64  # numbers of a rank that are multiplied at a time


def expansion_constants(dtype: torch.dtype, rank: int, tokens: int) -> dict[str, int]:
    """Return constants of `rotate_and_expand` for a dtype, a detour's rank and a step's tokens.

    Float32 has no registers for the larger tile.
    """
    tile = _FEW if tokens <= _FEW_TOKENS or dtype.itemsize > 2 else _MANY
    depth = next_power_of_2(max(16, min(rank, _DEPTH)))
    return {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "DEPTH": depth}


class PendingExpansion(BesideHeads):
    """The product of `low` [T, rank] with a detour's second matrix, [T, hidden]."""

    __slots__ = ("_linear", "_low")

    def __init__(self, linear: Linear, low: torch.Tensor) -> None:
        super().__init__()
        self._linear = linear
        self._low = low

    @property
    def joins(self) -> bool:
        own = self._linear
        plain = type(own) is Linear and own.bias is None and own.packed is None
        return plain and not own.invariant and not own.few_rows and runs_kernels(self._low.device)

    def _compute(self) -> torch.Tensor:
        return self._linear(self._low)

    def _launch_with(self, heads: HeadLaunch) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels.attention import beside_heads  # imports Triton

        low, weight = self._low, self._linear.weight
        (tokens, rank), size = low.shape, len(weight)
        out = torch.empty((tokens, size), dtype=low.dtype, device=low.device)
        constants = expansion_constants(low.dtype, rank, tokens)
        tiles = -(-tokens // constants["TOKENS"]) * -(-size // constants["OUTPUTS"])
        beside_heads.rotate_and_expand[(heads.total + tiles,)](
            *heads.arguments,
            *(out, low, weight, low.stride(0), tokens, heads.total),
            **heads.constants,
            PROGRAMS=heads.programs,
            SIZE=size,
            RANK=rank,
            **constants,
            **overlap(low.device),
        )
        return out
