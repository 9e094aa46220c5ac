"""Rows of steps for kernels: launched, or those of a recording that was idle before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.shard.torch_backend.interpreter import DEVICE
from tgi_trio.shard.torch_backend.recordings.decode_plans import idle_plan
from tgi_trio.shard.torch_backend.staging import Array
from tgi_trio.shard.torch_backend.states.chunks import Room
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.recorded_rows import (
    RecordedRows,
    idle_slots,
    row_staging,
)
from tgi_trio.shard.torch_backend.states.steps import StateSteps


def send(arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return arrays on the device of the tests."""
    return [torch.from_numpy(array).to(DEVICE) for array in arrays]


class Slots:
    """The slots of rows, and whether these are fresh."""

    def __init__(self, reads: list[int], writes: list[int], fresh: list[bool]) -> None:
        self.reads, self.writes, self.fresh = reads, writes, fresh

    def launched(self, lengths: Sequence[int]) -> StateSteps:
        """Return the rows of a launched step."""
        starts = np.cumsum([0, *lengths]).tolist()
        reads, writes, fresh = (
            torch.tensor(of, device=DEVICE) for of in (self.reads, self.writes, self.fresh)
        )
        return StateSteps(starts, reads, writes, fresh, send)

    def recorded(self, lengths: Sequence[int], tokens: int) -> tuple[StateSteps, RecordedRows]:
        """Return the rows of a recording of `tokens` tokens, and what fills in their listings.

        A recording is made before it is told of rows: whatever reads the listings comes first.
        """
        rows, device = len(lengths) + 2, torch.device(DEVICE)
        slots = [torch.tensor(array, device=device) for array in idle_slots(rows)]
        for slot, values in zip(slots, (self.reads, self.writes, self.fresh), strict=True):
            slot[: len(lengths)] = torch.tensor(values, device=device)
        pool = StatePool({}, 1, torch.float32, device)
        found = RecordedRows(Room(tokens, rows, 4), slots, pool, device, row_staging(device))
        return found.states.steps, found


def refill(rows: RecordedRows, lengths: Sequence[int]) -> None:
    """Tell a recording of rows of such lengths."""
    rows.refill(replace(idle_plan(1, 1), query_starts=np.cumsum([0, *lengths])))
