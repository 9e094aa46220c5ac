"""Where a model is loaded to: a device, a dtype, and which part of it is this rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.model.stages import Stage
from tgi_trio.shard.checkpoint.lookup import Checkpoint
from tgi_trio.shard.machine.device_memory import free_bytes
from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.weights import WeightSource


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a model is loaded to, and which part of it."""

    dtype: torch.dtype
    device: torch.device
    group: Ranks | None  # of all ranks
    stages: int = 1  # of a pipeline, which they form
    active_bits: int = 16  # of activations that 8-bit weights are multiplied by

    @property
    def world_size(self) -> int:
        return self.group.size if self.group else 1

    @property
    def ranks(self) -> Ranks | None:
        """Return those among which this rank's matrices are divided."""
        return None if self.group is None else self.group.parts

    @property
    def stage(self) -> Stage | None:
        """Return this rank's place in the pipeline, None where there is none."""
        if self.group is None or self.stages == 1:
            return None
        return Stage.of(self.group.rank, self.group.size, self.stages)

    def weights(self, checkpoint: Checkpoint, numbers: int = 0) -> WeightSource:
        """Return this rank's part of a checkpoint's tensors.

        `numbers`: those of all matrices. Quantised ones stay so where they would take more than
        half of the memory that is free, as numbers of the dtype.
        """
        rank = self.ranks.rank if self.ranks else 0
        free = free_bytes(self.device, self.world_size)
        return WeightSource(
            checkpoint,
            dtype=self.dtype,
            device=self.device,
            rank=rank,
            world_size=self.ranks.size if self.ranks else 1,
            keeps_codes=numbers * self.dtype.itemsize // self.world_size > free // 2,
            activations=self.active_bits,
        )
