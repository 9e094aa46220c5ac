"""Guesses of trained heads on the device, without waiting for the host.

Only the host finds out, when it reads a step's choices, which of a row's is the last accepted one.
So heads guess after every choice of a step, in the step's own recording. The guesses are read with
the tokens, and known when the next step is planned.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.speculation.heads import GUESSES
from tgi_trio.shard.torch_backend.guessing.heads import TorchHeads

_ROWS: Final = 64  # choices at a time: a head's logits take memory for the whole vocabulary


class DeviceDrafting:
    """Heads on one device, and how many tokens they guess."""

    def __init__(self, heads: TorchHeads, most: int, vocab_size: int) -> None:
        """Guess `most` tokens after every choice, or as many as there are heads if fewer."""
        self._heads = heads.on_device()
        self.most = min(most, heads.spec.heads)
        self._last_token = vocab_size - 1

    def guess(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return the guesses after each choice, int64 [C, most].

        `hidden` [C, features]: before the final norm; `found` float64 [C, 3]: from the device's
        sampler; arbitrary for padding.
        """
        tokens = found[:, 0].nan_to_num().clamp(0, self._last_token).long()
        guess, spec = GUESSES[type(self._heads.spec)], self._heads.spec
        parts = []
        for own, chosen in zip(hidden.split(_ROWS), tokens.split(_ROWS), strict=True):
            columns = guess(spec, self._heads, own, chosen, self.most)
            parts.append(torch.stack(columns, dim=1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
