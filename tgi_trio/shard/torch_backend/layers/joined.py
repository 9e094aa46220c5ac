"""Two linears of the same inputs, whose matrices lie one behind the other in a device's memory.

So both are multiplied in one launch, or the first one alone where nobody needs the second.
"""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.layers.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.torch_device import runs_kernels


class JoinedLinears:
    """Multiplies with both matrices at once."""

    __slots__ = ("first", "second", "whole")

    def __init__(self, first: Linear, second: Linear, whole: Linear) -> None:
        """`whole`: of all outputs; `first` and `second` have views of its weights."""
        self.first = first
        self.second = second
        self.whole = whole

    def serves(self, first: Linear | None, second: Linear) -> bool:
        """Return whether these are still the linears, with nothing around them (adapters)."""
        return first is self.first and second is self.second

    def pack(self) -> None:
        self.whole.pack()


def join_linears(first: Linear, second: Linear) -> JoinedLinears | None:
    """Move the weights of two linears into one matrix.

    None on a CPU, and where one launch cannot multiply with both: they have biases or different
    formats, or inputs are rounded. Nor where results must not depend on whether both are needed,
    as how a matrix is divided among programs follows from its size.
    """
    invariant = first.invariant or second.invariant
    if invariant or first.bias is not None or second.bias is not None:
        return None
    whole: Linear | None = None
    if isinstance(first, CodedLinear) and isinstance(second, CodedLinear):
        whole = first.join(second)
    elif type(first) is type(second) is Linear and runs_kernels(first.weight.device):
        weight = torch.cat((first.weight, second.weight))
        first.weight, second.weight = weight.split((len(first.weight), len(second.weight)))
        whole = Linear(weight)
    return None if whole is None else JoinedLinears(first, second, whole)
