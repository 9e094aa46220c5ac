"""What recordings of steps with prompts are told of their rows, where layers keep states."""

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

_TURNS: Final = 16  # copies that may be on their way: a few a step


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """What is told of rows, and where."""

    listing: Listing
    memory: torch.Tensor  # uint8


class _Listings:
    """What is told of the rows of a size's recordings; implements `ReservedRows`."""

    def __init__(self, room: Room, device: torch.device, staging: Staging) -> None:
        self.room = room
        self._device = device
        self._staging = staging
        self._told: list[_Told] = []

    def keep(self, listing: Listing) -> list[torch.Tensor]:
        """Return where `refill` tells what a listing says; there are no rows yet."""
        arrays = listing([0], self.room)
        memory = torch.zeros(packed_size(arrays), dtype=torch.uint8, device=self._device)
        self._staging.fill(memory, arrays)
        self._told.append(_Told(listing, memory))
        return split(memory, arrays)

    def refill(self, starts: Sequence[int]) -> None:
        """Tell the recordings of rows that start at `starts`, cumulative."""
        for told in self._told:
            self._staging.fill(told.memory, told.listing(starts, self.room))


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
        """`slots`: where they are told what `idle_slots` has; `pool`: which these are in.

        `staging`: what `row_staging` returns, of all sizes: its memory stays where it is.
        """
        self._listings = _Listings(room, device, staging)
        reads, writes, fresh = slots
        steps = StateSteps([0], reads, writes, fresh, reserved=self._listings)
        self.states = StepStates(pool.layers, steps)

    def fits(self, plan: StepPlan) -> bool:
        """Return whether no more of a plan's rows have several tokens than there is room for."""
        return int((np.diff(plan.query_starts) > 1).sum()) <= self._listings.room.longer

    def refill(self, plan: StepPlan) -> None:
        """Tell the recordings of a plan's rows, which `fits`."""
        self._listings.refill(plan.query_starts.tolist())


def row_staging(device: torch.device) -> Staging:
    """Return what copies to a device what recordings are told of their rows."""
    return Staging(device, turns=_TURNS)


def idle_slots(rows: int) -> list[Array]:
    """Return what `state_arrays` does, of rows that have no tokens."""
    none = np.full(rows, NULL_SLOT, np.int64)
    return [none, none, np.ones(rows, np.bool_)]
