"""A gate of low rank behind a norm, which its own result opens (A.X-K2, SK Telecom 2026).

On a device, the sum before the norm, the norm and the gate of few tokens are one launch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm_weights import NormWeights
from tgi_trio.shard.torch_backend.layers.opening import (
    compile_narrow,
    open_narrow,
    open_values,
    opens_narrow,
)
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
    adds_in_kernel,
    count_warps,
    describe_addition,
)
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap

_MOST_BYTES: Final = 1 << 19  # of both matrices, which every program reads


class OpenedTile(NamedTuple):
    """The tile of a program that adds, normalises and opens; its sizes are powers of two."""

    tokens: int
    numbers: int  # of a token in half precision that are multiplied at a time
    ahead: int  # blocks of so many that are in flight: 64 KB hide the latency of the level 2 cache


_LONE: Final = OpenedTile(1, 512, 5)  # a decode: as many programs as there are tokens
_SOME: Final = OpenedTile(4, 256, 7)
_LONE_TOKENS: Final = 64
MOST_TOKENS: Final = 256  # with more, both matrices are read anew too often
_RANK: Final = 16  # for which tiles are


def choose_opened_tile(tokens: int) -> OpenedTile:
    """Return the tile for a step's tokens."""
    return _LONE if tokens <= _LONE_TOKENS else _SOME


def opened_constants(dtype: torch.dtype, tokens: int, rank: int) -> dict[str, int]:
    """Return constants of `add_and_open` for numbers of a dtype, a step's tokens and gates."""
    tile, padded = choose_opened_tile(tokens), max(_RANK, next_power_of_2(rank))
    block = tile.numbers * _RANK // padded
    if dtype.itemsize > 2:
        block //= 4  # else registers spill
    sizes = {"RANK": rank, "PADDED_RANK": padded, "TOKENS": tile.tokens}
    return sizes | {"BLOCK": max(16, block), "AHEAD": tile.ahead}


class NormGate:
    """x * sigmoid(up(silu(down(x)))), whole on every rank."""

    __slots__ = ("down", "up")

    def __init__(self, down: Linear, up: Linear) -> None:
        self.down = down
        self.up = up

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Return `normed` [T, hidden], opened."""
        narrow = self.down(normed)
        if opens_narrow(self.up, normed.device):
            return open_narrow(normed, narrow, self.up, count=1, rounds=False)
        return open_values(normed, self.up(functional.silu(narrow)), in_float32=True)

    def add_and_open(
        self, x: torch.Tensor, addends: Addends | None, norm: NormWeights | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` [T, hidden] and `addends`, and the norm of it, opened."""
        if norm is not None and self._opens_sums(x):
            return self._launch(x.contiguous(), addends, norm)
        summed, normed = add_and_normalise(x, addends, norm)
        return summed, self(normed)

    def _opens_sums(self, x: torch.Tensor) -> bool:
        """Return whether a program can have all numbers of a token, and all of the gate."""
        narrow = all(opens_narrow(each, x.device) for each in (self.down, self.up))
        few = len(x) <= MOST_TOKENS and self.nbytes() <= _MOST_BYTES
        return narrow and few and adds_in_kernel(x)

    def _launch(
        self, x: torch.Tensor, addends: Addends | None, norm: NormWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from tgi_trio.shard.torch_backend.kernels import opened_norms  # imports Triton

        tokens, opened = len(x), torch.empty_like(x)
        own = describe_addition(x, addends, norm)
        constants = opened_constants(x.dtype, tokens, len(self.down.weight))
        opened_norms.add_and_open[(-(-tokens // constants["TOKENS"]),)](
            *(opened, torch.empty_like(x), *own.arguments),
            *(self.down.weight, self.up.weight, tokens),
            **own.constants,
            **constants,
            **overlap(x.device),
            num_warps=count_warps(own.constants["PADDED"]),
        )
        return own.summed, opened

    def pack(self) -> None:
        self.down.pack()
        self.up.pack()
        if opens_narrow(self.up, self.up.weight.device):
            compile_narrow(self.up, self.up.weight.shape[1], count=1, rounds=False)

    def nbytes(self) -> int:
        return self.down.nbytes() + self.up.nbytes()
