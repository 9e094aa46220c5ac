"""Which states a step reads and writes, and what a layer that has some has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StateSteps:
    """The rows of a step, as layers with states see them.

    A row may write where it reads. Only the null slot is in two rows.
    """

    starts: list[int]  # [R + 1] rows' first token in the flat list, cumulative; on the host
    reads: torch.Tensor  # int64 [R] slot of the state before the row's first token
    writes: torch.Tensor  # int64 [R] slot for the state behind its last
    fresh: torch.Tensor  # bool [R] the state before is zero, whatever the slot holds

    @property
    def decodes(self) -> bool:
        """Whether every row is one token."""
        return len(self.starts) - 1 == self.starts[-1]

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows' states [R, *shape] out of `states` [slots, *shape], as a copy."""
        fresh = self.fresh.view(-1, *[1] * (states.dim() - 1))
        return states.index_select(0, self.reads).masked_fill_(fresh, 0)

    def write(self, states: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows' new states [R, *shape], rounded to what `states` holds."""
        states.index_copy_(0, self.writes, values.to(states.dtype))


class MixerLayer(Protocol):
    """A layer's part that keeps a state per sequence.

    What a row gets depends neither on the other rows nor, but for rounding, on where the pieces of
    its sequence end.
    """

    def mix(
        self, x: torch.Tensor, states: Mapping[str, torch.Tensor], steps: StateSteps
    ) -> torch.Tensor:
        """Return what the layer makes of `x` [T, hidden], [T, hidden].

        With several ranks this is a partial sum. Reads each row's state from `states` (by name
        [slots, *shape]) at `steps.reads`, and writes the state behind its last token to
        `steps.writes`: nowhere else, so that the step can be repeated where they differ.
        """
        ...

    def pack(self) -> None:
        """Pack every large linear for this machine; see `Linear.pack`."""
        ...

    def nbytes(self) -> int:
        """Return the bytes of its weights."""
        ...
