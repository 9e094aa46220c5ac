"""The target of loading a model: a device, a dtype, and this rank's part."""

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
    """The device and dtype to which a model is loaded, and which part of it."""

    dtype: torch.dtype
    device: torch.device
    group: Ranks | None  # of all ranks
    stages: int = 1  # pipeline stages, which the ranks form
    active_bits: int = 16  # of activations that are multiplied by 8-bit weights
    invariant: bool = False  # see `batch_invariance.py`
    adapted: bool = False  # adapters may change the model's linears

    @property
    def world_size(self) -> int:
        return self.group.size if self.group else 1

    @property
    def ranks(self) -> Ranks | None:
        """Return the ranks among which this one's matrices are split; None: it has them whole."""
        return None if self.group is None else self.group.parts

    @property
    def stage(self) -> Stage | None:
        """Return this rank's pipeline stage, None without a pipeline."""
        if self.group is None or self.stages == 1:
            return None
        return Stage.of(self.group.rank, self.group.size, self.stages)

    def weights(self, checkpoint: Checkpoint, numbers: int = 0) -> WeightSource:
        """Return this rank's part of a checkpoint's tensors.

        `numbers`: how many all matrices have. Quantised matrices are kept so if this rank's part
        would take more than half of its free memory in `dtype`.
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
            invariant=self.invariant,
            adapted=self.adapted,
        )
