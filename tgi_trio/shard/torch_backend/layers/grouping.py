"""Finds the matrices of a layer's experts that one launch multiplies, by how they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.shard.torch_backend.layers.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.grouped_matrices import (
    CodedMatrices,
    GroupedMatrices,
    PlainMatrices,
)
from tgi_trio.shard.torch_backend.layers.grouped_trellis import TrellisMatrices
from tgi_trio.shard.torch_backend.layers.linear import Linear
from tgi_trio.shard.torch_backend.layers.stored_codes import Codes, stack
from tgi_trio.shard.torch_backend.layers.stored_trellis import Trellis, stack_trellises
from tgi_trio.shard.torch_backend.layers.trellis_linear import TrellisLinear


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
        own = stack_trellises(trellises)
        return None if own is None else TrellisMatrices(own, len(every), bias, invariant)
    below = stack(codes) if len(codes) == len(every) else None
    return None if below is None else CodedMatrices(below, len(every), bias, invariant)


def _numbers_or_codes(linear: Linear) -> torch.Tensor | Codes | Trellis | None:
    if isinstance(linear, CodedLinear | TrellisLinear):
        return linear.lone
    return linear.weight if type(linear) is Linear and linear.packed is None else None


def _stack_biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    """Return [linears, outputs], zeros for those without a bias; None if none has one."""
    biases = [linear.bias for linear in linears]
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if bias is None else bias for bias in biases])
