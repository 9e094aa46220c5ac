"""What a layer has instead of attention, or beside it, that keeps a state per sequence.

A state has one size however long its sequence is; every token overwrites it. No torch in this file:
every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

# "float32": recurrences, which add up over a whole text; "model": the dtype of the model.
StateDtype = Literal["float32", "model"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of what a layer keeps for a sequence, as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype

    def nbytes(self, model_itemsize: int) -> int:
        """Return its bytes for one sequence; `model_itemsize`: of a number of the model."""
        return prod(self.shape) * (4 if self.dtype == "float32" else model_itemsize)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated causal convolution over the last few tokens, per channel (LFM2, Liquid AI 2025).

    (b, c, x) = in(u); y_t = c_t * sum_k w_k (b * x)_(t - taps + 1 + k); out(y).
    """

    channels: int
    taps: int  # of the convolution: the token itself and those before it
    bias: bool = False  # of the convolution and of both linears

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: the last inputs of the convolution, oldest first.

        Channels are divided evenly over `ranks`.
        """
        return (StateShape("tail", (self.taps - 1, self.channels // ranks), "model"),)


Mixer: TypeAlias = ShortConvolution
