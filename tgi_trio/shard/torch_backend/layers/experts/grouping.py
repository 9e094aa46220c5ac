"""The matrices of a layer's experts, by how they are stored, and both products of an expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.experts.grouped_matrices import (
    CodedMatrices,
    GroupedMatrices,
    PlainMatrices,
    Routed,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_trellis import TrellisMatrices
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import Codes, stack
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import Trellis, stack_trellises
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import TrellisLinear


def group_linears(linears: Sequence[Linear]) -> GroupedMatrices | None:
    """Return the matrices of equally large linears as one; None if they are stored differently."""
    every = [_numbers_or_codes(linear) for linear in linears]
    numbers = [part for part in every if isinstance(part, torch.Tensor)]
    codes = [part for part in every if isinstance(part, Codes)]
    trellises = [part for part in every if isinstance(part, Trellis)]
    bias, invariant = _stack_biases(linears), linears[0].invariant
    if len(numbers) == len(every):
        return PlainMatrices(torch.stack(numbers), bias, invariant)
    if len(trellises) == len(every):
        own, apart = stack_trellises(trellises), {_is_apart(linear) for linear in linears}
        if own is None or len(apart) > 1:
            return None
        return TrellisMatrices(own, len(every), bias, invariant, apart.pop())
    below = stack(codes) if len(codes) == len(every) else None
    return None if below is None else CodedMatrices(below, len(every), bias, invariant)


def _numbers_or_codes(linear: Linear) -> torch.Tensor | Codes | Trellis | None:
    if isinstance(linear, TrellisLinear):
        return linear.lone or linear.join_halves()
    if isinstance(linear, CodedLinear):
        return linear.lone
    return linear.weight if type(linear) is Linear and linear.packed is None else None


def _is_apart(linear: Linear) -> bool:
    """Return whether gates and ups are padded to blocks of 128 each."""
    return isinstance(linear, TrellisLinear) and linear.lone is None


def _stack_biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    """Return [linears, outputs], zeros for those without a bias; None if none has one."""
    biases = [linear.bias for linear in linears]
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if bias is None else bias for bias in biases])


def multiply_both(
    up: GroupedMatrices,
    down: GroupedMatrices,
    x: torch.Tensor,
    routed: Routed,
    act: Activation,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what each pair's expert says [pairs, hidden], by pair: down(act(up(x))).

    `x`: as for `multiply_groups`, by token or by pair; `room`: as for `GroupedMatrices`.
    """
    gate = act if isinstance(act, Gate) and act.kernel else None
    match (up, down):
        case (TrellisMatrices(), TrellisMatrices()) if gate and up.feeds(down, gate):
            return up.feed(down, x, routed, gate, room)
    inner = up.multiply(x, routed, gathers=True, gate=gate)
    if gate is None:
        inner = act(inner).contiguous()
    return down.multiply(inner, routed, gathers=False, room=room)
