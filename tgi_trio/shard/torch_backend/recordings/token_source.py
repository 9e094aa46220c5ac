"""The token ids of a step on the device, including those that the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.torch_device import overlap

_BLOCK = 256  # tokens a program


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Fills in the tokens that the previous step chose on the device."""

    # int64, by row of the previous step, on the rank that chooses; None on the others
    chosen: torch.Tensor | None
    ranks: Ranks | None = None  # None: this is the only rank

    def fill_in(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the token ids [T], on all ranks, with those that the previous step chose.

        `inputs`: int32 [T], an index into `chosen` for each token, or -1 for the one in `ids`. All
        ranks call this in the same steps. `ids` may be overwritten.
        """
        if self.chosen is not None:
            from tgi_trio.shard.torch_backend.kernels.sampling.filling import (
                fill_tokens,  # imports Triton
            )

            filled, count = torch.empty_like(ids), len(ids)
            fill_tokens[(-(-count // _BLOCK),)](
                *(filled, ids, inputs, self.chosen, count),
                BLOCK=_BLOCK,
                OVERLAPS=overlap(ids.device)["OVERLAPS"],
            )
            ids = filled
        return ids if self.ranks is None else self.ranks.broadcast(ids)
