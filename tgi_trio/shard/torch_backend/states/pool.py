"""The pool of sequences' states: tensors with a slot for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from tgi_trio.model.specs.decoder import LayerSpec
from tgi_trio.model.specs.mixers import StateShape

StateShapes: TypeAlias = Mapping[int, Sequence[StateShape]]  # by the number of the layer

_DTYPES: Final[Mapping[str, torch.dtype]] = {"float32": torch.float32, "token": torch.int64}
NULL_SLOT = 0  # never handed out: rows of synthetic steps read and write it


def list_state_shapes(layers: Sequence[LayerSpec], ranks: int) -> StateShapes:
    """Return what each layer keeps of a sequence on one of `ranks` ranks, of those that do."""
    found = {}
    for i, layer in enumerate(layers):
        if layer.mixer is not None:
            found[i] = layer.mixer.state_shapes(ranks)
        if layer.ngrams is not None:
            found[i] = (*found.get(i, ()), *layer.ngrams.state_shapes())
    return found


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
        *,
        in_turns: bool = False,
    ) -> None:
        """Allocate; raises torch's out-of-memory errors.

        `shapes`: see `Mixer.state_shapes`; `dtype` is the model's; `in_turns`: whether any layer's
        recordings move states turn after turn.
        """
        self.in_turns = in_turns
        self.slots = slots
        self.layers: dict[int, dict[str, torch.Tensor]] = {
            layer: {
                own.name: torch.zeros(
                    (slots, *own.shape),
                    dtype=_DTYPES.get(own.dtype, dtype),
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
    def tensors(self) -> list[torch.Tensor]:
        """All states, each [slots, ...]."""
        return [each for layer in self.layers.values() for each in layer.values()]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)
