"""Blocks of attention and MLP that several layers share, each adding low-rank products of its own.

Source: Zamba2 (Zyphra 2024, arXiv 2411.15242), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tgi_trio.shard.torch_backend.layers.linears.linear import Linear, WrappedLinear
from tgi_trio.shard.torch_backend.layers.norm import Norm


class SharedLinear(WrappedLinear):
    """A linear that several layers share, with one layer's low-rank addition."""

    __slots__ = ("_counted", "down", "ups")

    def __init__(
        self, base: Linear, down: Linear | None, ups: Sequence[Linear], *, counted: bool
    ) -> None:
        """`down`: its output is divided evenly among `ups`; None: nothing is added.

        `counted`: the bytes of `base` count as this layer's.
        """
        super().__init__(base)
        self.down = down
        self.ups = tuple(ups)
        self._counted = counted

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.down is None:
            return self.base(x)
        parts = self.down(x).chunk(len(self.ups), dim=-1)
        added = [up(part) for up, part in zip(self.ups, parts, strict=True)]
        return self.base(x) + (added[0] if len(added) == 1 else torch.cat(added, dim=-1))

    def pack(self) -> None:
        super().pack()
        for linear in self._own():
            linear.pack()

    def nbytes(self) -> int:
        own = sum(linear.nbytes() for linear in self._own())
        return own + (self.base.nbytes() if self._counted else 0)

    def _own(self) -> tuple[Linear, ...]:
        return () if self.down is None else (self.down, *self.ups)


@dataclass(frozen=True, slots=True, eq=False)
class SharedUse:
    """How a layer goes on from its shared block's output."""

    exit: Linear
    mixer_norm: Norm

    def join(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the mixer's input, for `x` and the block's `output`; all are [T, hidden]."""
        return self.mixer_norm(x + self.exit(output))

    def pack(self) -> None:
        self.exit.pack()

    def nbytes(self) -> int:
        return self.exit.nbytes() + self.mixer_norm.nbytes()
