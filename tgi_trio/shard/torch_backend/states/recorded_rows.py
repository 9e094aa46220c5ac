"""Inputs of recorded steps with prompts that describe their rows, for layers that keep states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.staging import Array, Staging, packed_size, split
from tgi_trio.shard.torch_backend.states.chunks import Room
from tgi_trio.shard.torch_backend.states.pool import NULL_SLOT, StatePool
from tgi_trio.shard.torch_backend.states.steps import Listing, StateSteps, StepStates

_TURNS: Final = 16  # copies that may be in flight: each step takes several


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """A listing of rows, and the device memory for it."""

    listing: Listing
    memory: torch.Tensor  # uint8


class _Listings:
    """The listings of rows for the recordings of one size; implements `ReservedRows`."""

    def __init__(self, room: Room, device: torch.device, staging: Staging) -> None:
        self.room = room
        self._device = device
        self._staging = staging
        self._listed: list[_Listed] = []

    def keep(self, listing: Listing) -> list[torch.Tensor]:
        """Return the tensors to which `refill` writes a listing; first it lists no rows."""
        arrays = listing([0], self.room)
        memory = torch.zeros(packed_size(arrays), dtype=torch.uint8, device=self._device)
        self._staging.fill(memory, arrays)
        self._listed.append(_Listed(listing, memory))
        return split(memory, arrays)

    def refill(self, starts: Sequence[int]) -> None:
        """Upload all listings of rows that start at `starts`, cumulative."""
        for listed in self._listed:
            self._staging.fill(listed.memory, listed.listing(starts, self.room))


class RecordedRows:
    """The rows of recordings of one size.

    The states hold a reference to the listings, and this object to both. With a reference cycle,
    the state pool would stay on the device after a second warm-up has dropped it, until the next
    garbage collection.
    """

    def __init__(
        self,
        room: Room,
        slots: Sequence[torch.Tensor],
        pool: StatePool,
        device: torch.device,
        staging: Staging,
    ) -> None:
        """`slots`: tensors on the device like the arrays of `idle_slots`, of slots in `pool`.

        `staging`: from `row_staging`, one for the recordings of all sizes.
        """
        self._listings = _Listings(room, device, staging)
        reads, writes, fresh = slots
        steps = StateSteps([0], reads, writes, fresh, reserved=self._listings)
        self.states = StepStates(pool.layers, steps)

    def fits(self, plan: StepPlan) -> bool:
        """Return whether there is room for a plan's rows of more than one token."""
        return int((np.diff(plan.query_starts) > 1).sum()) <= self._listings.room.longer

    def refill(self, plan: StepPlan) -> None:
        """Upload what the recordings read of a plan's rows; `fits` has accepted the plan."""
        self._listings.refill(plan.query_starts.tolist())


def row_staging(device: torch.device) -> Staging:
    """Return the staging through which listings of rows are uploaded."""
    return Staging(device, turns=_TURNS)


def idle_slots(rows: int) -> list[Array]:
    """Return what `state_arrays` does for rows without tokens."""
    none = np.full(rows, NULL_SLOT, np.int64)
    return [none, none, np.ones(rows, np.bool_)]
