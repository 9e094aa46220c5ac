"""Features of images among a step's tokens, on the device of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.shard.contract import StepPlan


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

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return embeddings `x` [T, hidden] with the features in their places."""
        return x.index_copy(0, self.places, self.rows.to(x.dtype))

    def deepen(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Return what `layer` has made of the step [T, hidden], with what its images add to it."""
        if layer >= len(self.deep):
            return x
        return x.index_add(0, self.places, self.deep[layer].to(x.dtype))
