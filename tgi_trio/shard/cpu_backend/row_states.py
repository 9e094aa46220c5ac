"""The slots of recurrent states that a step's rows read and write, in the kernels' form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan

Ints = NDArray[np.int32]

NULL_SLOT = 0  # never assigned to a sequence: rows of dummy steps write it


@dataclass(frozen=True, slots=True)
class RowStates:
    """Int32 arrays of R rows. A row may write where it reads."""

    starts: Ints  # [R + 1] each row's first token in the flat list, cumulative
    reads: Ints  # [R] slot of the state before the row's first token; -1: zeros
    writes: Ints  # [R] slot for the state after its last token

    @classmethod
    def of(cls, plan: StepPlan) -> RowStates:
        """Raises ValueError for rows without slots that do not begin a sequence."""
        starts = plan.query_starts.astype(np.int32)
        fresh = plan.positions[starts[:-1]] == 0
        if plan.state_reads is None or plan.state_writes is None:
            if not fresh.all():
                raise ValueError("rows of a model that keeps states go on without any")
            nowhere = np.full(len(fresh), NULL_SLOT, np.int32)
            return cls(starts, nowhere - 1, nowhere)
        reads = np.where(fresh, -1, plan.state_reads).astype(np.int32)
        return cls(starts, reads, plan.state_writes.astype(np.int32))
