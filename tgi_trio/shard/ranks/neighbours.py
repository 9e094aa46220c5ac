"""The stages before and behind this one, for who computes in numpy: what they say, agreement."""

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

    def __init__(self, group: Ranks) -> None:
        """`group`: of all ranks, each of which is a stage."""
        self.stage = Stage(group.rank, group.size)
        self._group = group

    def receive(self, hidden: Floats) -> None:
        """Overwrite `hidden` [T, hidden] with what the stage before says; the first keeps it."""
        if not self.stage.is_first:
            self._group.receive(torch.from_numpy(hidden), self.stage.before)

    def send(self, hidden: Floats) -> None:
        """Send `hidden` [T, hidden] as it is now to the next stage; the last one has none."""
        if not self.stage.is_last:
            self._group.send(torch.from_numpy(hidden.copy()), self.stage.after)

    def describe(self) -> str:
        """Return what an operator is told."""
        return f"one of {self.stage.size} stages"

    def least(self, value: int) -> int:
        """Return the least of all ranks' `value`s."""
        return self._group.least(value, _CPU)
