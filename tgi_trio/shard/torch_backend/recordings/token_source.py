"""Token ids of a step on the device, those included that only a device knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.torch_device import overlap

_BLOCK = 256  # tokens of a program


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where a rank has the tokens from that the step before chose."""

    # int64, by row of the step before, on the rank that chooses; None: on another one
    chosen: torch.Tensor | None
    ranks: Ranks | None = None  # None: there are no others

    def fill_in(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return token ids [T] in which those that the step before chose are known, on all ranks.

        `inputs` int32 [T]: which of `chosen` a token is, -1: the one in `ids`. All ranks call this
        in the same steps; `ids` may be overwritten.
        """
        if self.chosen is not None:
            from tgi_trio.shard.torch_backend.kernels.filling import fill_tokens  # imports Triton

            filled, count = torch.empty_like(ids), len(ids)
            fill_tokens[(-(-count // _BLOCK),)](
                *(filled, ids, inputs, self.chosen, count),
                BLOCK=_BLOCK,
                OVERLAPS=overlap(ids.device)["OVERLAPS"],
            )
            ids = filled
        return ids if self.ranks is None else self.ranks.broadcast(ids)
