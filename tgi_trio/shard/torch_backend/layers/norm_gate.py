"""A gate of low rank behind a norm, which its own result opens (A.X-K2, SK Telecom 2026)."""

from __future__ import annotations

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.opening import (
    compile_narrow,
    open_narrow,
    open_values,
    opens_narrow,
)


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

    def pack(self) -> None:
        self.down.pack()
        self.up.pack()
        if opens_narrow(self.up, self.up.weight.device):
            compile_narrow(self.up, self.up.weight.shape[1], count=1, rounds=False)

    def nbytes(self) -> int:
        return self.down.nbytes() + self.up.nbytes()
