"""Features of images among a step's tokens, on the device of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tgi_trio.shard.contract import StepPlan


class Broadcasting(Protocol):
    """One of several ranks."""

    rank: int

    def broadcast(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepFeatures:
    """See `PlacedFeatures`; these are where the model is."""

    places: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # float32 [N, hidden]
    deep: tuple[torch.Tensor, ...]  # float32 [N, hidden] each

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> StepFeatures | None:
        """Return a plan's features, None where it has none."""
        placed = plan.features
        if placed is None:
            return None
        return cls(
            torch.from_numpy(placed.places).to(device),
            torch.from_numpy(placed.rows).to(device),
            tuple(torch.from_numpy(rows).to(device) for rows in placed.deep),
        )

    def share(self, ranks: Broadcasting, hidden: int) -> StepFeatures:
        """Return rank 0's features [N, hidden]: the other ranks only know where they are to stand.

        One rank computes towers, so that no other holds one, and none can differ.
        """

        def receive(rows: torch.Tensor) -> torch.Tensor:
            whole = rows if ranks.rank == 0 else rows.new_empty((len(rows), hidden))
            return ranks.broadcast(whole.contiguous())

        return StepFeatures(self.places, receive(self.rows), tuple(map(receive, self.deep)))

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return embeddings `x` [T, hidden] with the features in their places."""
        return x.index_copy(0, self.places, self.rows.to(x.dtype))

    def deepen(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Return what `layer` has made of the step [T, hidden], with what its images add to it."""
        if layer >= len(self.deep):
            return x
        return x.index_add(0, self.places, self.deep[layer].to(x.dtype))
