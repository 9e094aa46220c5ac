"""The outputs of a token's experts on a device, before they are summed.

The launch that adds them to the hidden state can sum them as well (`residual.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParts:
    """The experts' outputs, and their weights."""

    parts: torch.Tensor  # [T * (per token + shared), hidden], contiguous
    weights: torch.Tensor  # [T, per token]
    doors: torch.Tensor | None  # [T, 1]: logits of the shared experts' gate; None: weight 1
    shared: int
    # [T, hidden], contiguous: what a shared expert says that is multiplied separately; the door is
    # its own then.
    beside: torch.Tensor | None = None

    @property
    def per_token(self) -> int:
        return self.weights.shape[1]

    def combine(self) -> torch.Tensor:
        """Return the weighted sums, [T, hidden]."""
        from tgi_trio.shard.torch_backend.kernels.combining import combine_experts  # imports Triton

        tokens, size = len(self.weights), self.parts.shape[1]
        out = self.parts.new_empty(tokens, size)
        combine_experts[(tokens, -(-size // _BLOCK))](
            out,
            self.parts,
            self.weights,
            self.parts if self.doors is None else self.doors,
            self.parts if self.beside is None else self.beside,
            SIZE=size,
            PER_TOKEN=self.per_token,
            SHARED=self.shared,
            HAS_DOOR=self.doors is not None,
            BESIDE=self.beside is not None,
            BLOCK=_BLOCK,
        )
        return out
