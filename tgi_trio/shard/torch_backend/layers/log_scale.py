"""Queries that are scaled by the logarithm of their position, each head by numbers of its own.

Softmax over more keys is flatter; this sharpens it (Scalable-Softmax, Nakanishi 2025). On a device
it is one launch.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.torch_device import runs_kernels

_ELEMENTS: Final = 2048  # of a program of four warps


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
        if runs_kernels(queries.device) and queries.stride()[1:] == (queries.shape[2], 1):
            self._launch(queries, logs)
            return
        queries.mul_(torch.addcmul(self.bias, self.scale, logs[:, 0])[..., None])

    def _launch(self, queries: torch.Tensor, logs: torch.Tensor) -> None:
        from tgi_trio.shard.torch_backend.kernels.rotating import scale_heads  # imports Triton

        tokens, heads, dim = queries.shape
        block = count_scaled(dim)
        scale_heads[(tokens, -(-heads // block))](
            *(queries, self.scale, self.bias, logs, queries.stride(0)),
            HEADS=heads,
            DIM=dim,
            PADDED_DIM=1 << (dim - 1).bit_length(),
            BLOCK=block,
        )

    def nbytes(self) -> int:
        return self.scale.nbytes + self.bias.nbytes


def count_scaled(dim: int) -> int:
    """Return the heads that a program multiplies, a power of two."""
    return max(1, _ELEMENTS >> (dim - 1).bit_length())
