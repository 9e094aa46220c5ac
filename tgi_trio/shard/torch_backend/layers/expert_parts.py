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
    gate_logits: torch.Tensor | None  # [T, 1]: logits of the shared experts' gate; None: weight 1
    shared: int
    # [T, hidden], contiguous: what a shared expert says that is multiplied separately; the gate is
    # its own then.
    beside: torch.Tensor | None = None

    @staticmethod
    def describe(
        found: torch.Tensor | ExpertParts,
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, int | bool]]:
        """Return what kernels read that add `found`, and their constants.

        That is `found` [T, hidden] or the parts of which it is the sum, then weights, gate logits
        and what is beside them, or what stands for these.
        """
        if isinstance(found, torch.Tensor):
            kind: dict[str, int | bool] = {"PER_TOKEN": 0, "SHARED": 0}
            return (found.contiguous(),) * 4, kind | {"HAS_GATE": False, "BESIDE": False}
        parts, gate_logits, beside = found.parts, found.gate_logits, found.beside
        read = (parts, found.weights, parts if gate_logits is None else gate_logits)
        kind = {"PER_TOKEN": found.per_token, "SHARED": found.shared}
        kind |= {"HAS_GATE": gate_logits is not None, "BESIDE": beside is not None}
        return (*read, parts if beside is None else beside), kind

    @property
    def per_token(self) -> int:
        return self.weights.shape[1]

    def combine(self) -> torch.Tensor:
        """Return the weighted sums, [T, hidden]."""
        from tgi_trio.shard.torch_backend.kernels.combining import combine_experts  # imports Triton

        tokens, size = len(self.weights), self.parts.shape[1]
        out = self.parts.new_empty(tokens, size)
        read, constants = self.describe(self)
        combine_experts[(tokens, -(-size // _BLOCK))](
            out, *read, SIZE=size, BLOCK=_BLOCK, **constants
        )
        return out
