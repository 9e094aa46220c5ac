"""What experts say of some tokens, before it is summed."""

from __future__ import annotations

import torch

from tests.shard.torch_backend.interpreter import DEVICE
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts

_EACH = 2  # experts of a token


def some_experts(tokens: int, hidden: int, kind: str) -> ExpertParts:
    """Return random parts, bfloat16. `kind`: "shared and gates", "beside" or "alone"."""
    draw = torch.Generator().manual_seed(tokens)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(DEVICE, torch.bfloat16)

    shared = kind.startswith("shared")
    parts = some(tokens * (_EACH + shared), hidden)
    gate_logits = some(tokens, 1) if shared else None
    beside = some(tokens, hidden) if kind == "beside" else None
    return ExpertParts(parts, some(tokens, _EACH), gate_logits, int(shared), beside)
