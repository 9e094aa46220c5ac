"""Communication with the previous and the next pipeline stage, for backends with numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.model.stages import Stage

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.models.decoder import Ranks

Floats = NDArray[np.float32]
_CPU = torch.device("cpu")


class Neighbours:
    """A rank's place in a pipeline whose stages compute on CPUs, each step in the same order."""

    def __init__(self, group: Ranks, stages: int) -> None:
        """`group`: of all ranks, which form so many stages."""
        self.stage = Stage.of(group.rank, group.size, stages)
        self._group = group

    def receive(self, hidden: Floats) -> None:
        """Receive `hidden` [T, hidden] from the previous stage; the first stage keeps its own."""
        if not self.stage.is_first:
            self._group.receive(torch.from_numpy(hidden), self.stage.before)

    def send(self, hidden: Floats) -> None:
        """Send a copy of `hidden` [T, hidden] to the next stage, if there is one."""
        if not self.stage.is_last:
            self._group.send(torch.from_numpy(hidden.copy()), self.stage.after)

    def describe(self) -> str:
        """Return a description for the operator."""
        stage = f"one of {self.stage.size} stages"
        return stage if self.stage.width == 1 else f"{stage} of {self.stage.width} ranks"

    def least(self, value: int) -> int:
        """Return the minimum of all ranks' `value`s."""
        return self._group.least(value, _CPU)
