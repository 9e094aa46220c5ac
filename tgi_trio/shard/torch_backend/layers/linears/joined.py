"""Two linears of the same inputs, whose matrices lie one behind the other in a device's memory.

So both are multiplied in one launch, or the first one alone where nobody needs the second.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.torch_device import runs_kernels


class JoinedLinears:
    """Multiplies with both matrices at once."""

    __slots__ = ("first", "outputs", "second", "whole")

    def __init__(
        self, first: Linear, second: Linear, whole: Linear, outputs: tuple[int, int]
    ) -> None:
        """`whole`: of the `outputs` of both, which have views of its weights."""
        self.first = first
        self.second = second
        self.whole = whole
        self.outputs = outputs

    def serves(self, first: Linear | None, second: Linear | None) -> bool:
        """Return whether these are still the linears, with nothing around them (adapters)."""
        return first is self.first and second is self.second

    def multiply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the products of `x` [..., inputs] with both, [..., outputs] each, views of one."""
        found = self.whole(x)
        first, second = found.split(self.outputs, dim=-1)
        return first, second

    def pack(self) -> None:
        self.whole.pack()


def list_multiplied(
    joined: JoinedLinears | None, first: Linear | None, second: Linear | None
) -> Iterator[Linear]:
    """Yield the linears by which a step multiplies that needs both: one, if they are joined."""
    if joined is not None and joined.serves(first, second):
        yield joined.whole
        return
    yield from (each for each in (first, second) if each is not None)


def join_linears(first: Linear, second: Linear) -> JoinedLinears | None:
    """Move the weights of two linears into one matrix.

    None on a CPU, and where one launch cannot multiply with both: they have biases or different
    formats, or inputs are rounded. Where batch invariance is kept, every step must need both: how a
    matrix is divided among programs follows from its size, and with it the first one's bits.
    """
    if first.bias is not None or second.bias is not None:
        return None
    whole: Linear | None = None
    if isinstance(first, CodedLinear) and isinstance(second, CodedLinear):
        whole, sizes = first.join(second), (first.outputs, second.outputs)
    elif type(first) is type(second) is Linear and runs_kernels(first.weight.device):
        weight = torch.cat((first.weight, second.weight))
        sizes = len(first.weight), len(second.weight)
        first.weight, second.weight = weight.split(sizes)
        whole = Linear(weight, invariant=first.invariant)
    return None if whole is None else JoinedLinears(first, second, whole, sizes)
