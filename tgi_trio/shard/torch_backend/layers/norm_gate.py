"""A gate of low rank behind a norm, which its own result opens (A.X-K2, SK Telecom 2026)."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.opening import open_values


class NormGate:
    """x * sigmoid(up(silu(down(x)))), whole on every rank."""

    __slots__ = ("down", "up")

    def __init__(self, down: Linear, up: Linear) -> None:
        self.down = down
        self.up = up

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Return `normed` [T, hidden], opened."""
        return open_values(normed, self.up(functional.silu(self.down(normed))), in_float32=True)

    def pack(self) -> None:
        self.down.pack()
        self.up.pack()

    def nbytes(self) -> int:
        return self.down.nbytes() + self.up.nbytes()
