"""Drafts of trained heads on the device, without waiting for the host.

Only the host finds out, when it reads a step's choices, which of a row's is the last accepted one.
So heads draft after every choice of a step, in the step's own recording. The drafts are read with
the tokens, and known when the next step is planned.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.speculation.heads import DRAFT_FUNCTIONS
from tgi_trio.shard.torch_backend.drafting.heads import TorchHeads

_ROWS: Final = 64  # choices at a time: a head's logits take memory for the whole vocabulary


class DeviceDrafting:
    """Heads on one device, and how many tokens they draft."""

    def __init__(self, heads: TorchHeads, most: int, vocab_size: int) -> None:
        """Draft `most` tokens after every choice, or as many as there are heads if fewer."""
        self._heads = heads.on_device()
        self.most = min(most, heads.spec.heads)
        self._last_token = vocab_size - 1

    def draft(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return the drafts after each choice, int64 [C, most].

        `hidden` [C, features]: before the final norm; `found` float64 [C, 3]: from the device's
        sampler; arbitrary for padding.
        """
        tokens = found[:, 0].nan_to_num().clamp(0, self._last_token).long()
        draft, spec = DRAFT_FUNCTIONS[type(self._heads.spec)], self._heads.spec
        parts = []
        for own, chosen in zip(hidden.split(_ROWS), tokens.split(_ROWS), strict=True):
            columns = draft(spec, self._heads, own, chosen, self.most)
            parts.append(torch.stack(columns, dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
