"""Queries that are scaled by the logarithm of their position, each head by numbers of its own.

Softmax over more keys is flatter; this sharpens it (Scalable-Softmax, Nakanishi 2025). On a device
queries are multiplied as attention and index read them.
"""

from __future__ import annotations

import torch


class LogScale:
    """A head's factor is scale * log(position + 1) + bias."""

    __slots__ = ("bias", "scale")

    def __init__(self, scale: torch.Tensor, bias: torch.Tensor) -> None:
        """Both [heads], of the model's dtype."""
        self.scale = scale
        self.bias = bias

    def multiply(self, queries: torch.Tensor, logs: torch.Tensor | None) -> None:
        """Multiply queries [T, heads, dim] in place; `logs`: those of `RotaryTable`.

        Raises ValueError if there are none.
        """
        if logs is None:
            raise ValueError("queries are scaled by their positions, and the step has no table")
        queries.mul_(torch.addcmul(self.bias, self.scale, logs[:, 0])[..., None])

    def nbytes(self) -> int:
        return self.scale.nbytes + self.bias.nbytes

    def describe(self, logs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return what kernels read: scales, biases and logarithms.

        Raises ValueError if there are no logarithms.
        """
        if logs is None:
            raise ValueError("queries are scaled by their positions, and the step has no table")
        return self.scale, self.bias, logs
