"""The pool of sequences' states: tensors with a slot for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from tgi_trio.model.mixers import StateShape

StateShapes: TypeAlias = Mapping[int, Sequence[StateShape]]  # by the number of the layer

NULL_SLOT = 0  # never handed out: rows of synthetic steps read and write it


class StatePool:
    """A tensor [slots, *shape] for each layer and name of a state.

    Memory is zeroed, so no slot holds garbage; on Linux it takes none until it is written.
    """

    def __init__(
        self,
        shapes: StateShapes,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate; raises torch's out-of-memory errors.

        `shapes`: see `Mixer.state_shapes`; `dtype` is the model's.
        """
        self.slots = slots
        self.layers: dict[int, dict[str, torch.Tensor]] = {
            layer: {
                own.name: torch.zeros(
                    (slots, *own.shape),
                    dtype=torch.float32 if own.dtype == "float32" else dtype,
                    device=device,
                )
                for own in states
            }
            for layer, states in shapes.items()
        }

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole states from slots to slots, both int64 [N]; no slot is in both."""
        for layer in self.layers.values():
            for states in layer.values():
                states.index_copy_(0, targets, states.index_select(0, sources))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for layer in self.layers.values() for each in layer.values())
