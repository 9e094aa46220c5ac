"""Guesses of trained heads where the hidden states are: nothing of them waits for the host.

Which of a row's choices is the last that counts, only the host finds out, when it reads them. So
heads guess behind every choice of a step, in the step's own recording; what they guess comes down
with the tokens, and is there when the next step is planned.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.speculation.heads import GUESSES
from tgi_trio.shard.torch_backend.guessing.heads import TorchHeads

_ROWS: Final = 64  # guessed for together: a head's logits take memory for the whole vocabulary


class DeviceDrafting:
    """Heads on one device, and how many tokens they guess."""

    def __init__(self, heads: TorchHeads, most: int, vocab_size: int) -> None:
        """Guess `most` tokens behind every choice, or as many as there are heads."""
        self._heads = heads.on_device()
        self.most = min(most, heads.spec.heads)
        self._last_token = vocab_size - 1

    def guess(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return int64 [C, most] guesses behind each choice.

        `hidden` [C, features] before the final norm; `found` float64 [C, 3] as choices leave it,
        anything for choices of nobody.
        """
        tokens = found[:, 0].nan_to_num().clamp(0, self._last_token).long()
        guess, spec = GUESSES[type(self._heads.spec)], self._heads.spec
        parts = []
        for own, chosen in zip(hidden.split(_ROWS), tokens.split(_ROWS), strict=True):
            columns = guess(spec, self._heads, own, chosen, self.most)
            parts.append(torch.stack(columns, dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
