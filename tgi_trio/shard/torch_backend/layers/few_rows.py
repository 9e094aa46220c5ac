"""Which matrices one or two rows are multiplied with by our kernel, and which by the library.

An H200 has shown (bench/results/h200-few-rows.json) that the library reads the matrices of 1B and
8B models at 32 to 98 % of the bandwidth for one row, and a kernel that has the sum and norm before
the product and the gate behind it in its launch at 66 to 98 %; of four rows the library's
tensor cores read large ones faster. So what is taken is measured at the warm-up, on the device that
serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.expert_parts import ExpertParts
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linear import Linear, Soon
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
    addend_arguments,
    addend_constants,
)
from tgi_trio.shard.torch_backend.torch_device import count_multiprocessors, overlap

_LEAST: Final = 1 << 20  # numbers of a matrix that is worth a look
_WORTH: Final = 0.97  # of the library's time, from which on ours is taken
WARPS: Final = 8
_WIDE: Final = 4096  # inputs beyond which a thread has twice the weights at a time
# Programs of a multiprocessor by rows, of short rows and of long ones: as many as registers allow.
_PROGRAMS: Final = {1: (4, 2), 2: (3, 1)}
_AHEAD: Final = 1  # lines that each thread of a program brings to the cache while it waits
_LINE: Final = 128  # bytes
_MOST_INPUTS: Final = 1 << 14  # that a program keeps of each row

Seconds = Callable[[Callable[[], torch.Tensor]], float]  # that some work takes on the device


class FewTile(NamedTuple):
    """What a program of `multiply_few` computes at a time, and how many run together."""

    outputs: int
    programs: int  # of a multiprocessor


def choose_tile(inputs: int, rows: int, *, gated: bool) -> FewTile:
    """Return a tile of 32 weights a thread, or 64 where rows are long; half are of gates."""
    padded, long = 1 << (inputs - 1).bit_length(), inputs > _WIDE
    weights = (64 if long else 32) * 32 * WARPS
    return FewTile(max(1, weights // padded >> gated), _PROGRAMS[rows][long])


class Projection(NamedTuple):
    """A linear, what is normalised before it and what is done with what comes out."""

    linear: Linear
    norm: Norm | None
    act: Activation | None
    like: Addends  # what is added before: its tensors are of no interest
    after: Linear | None = None  # the linear before it, where that one waits for attention

    def __call__(
        self, x: torch.Tensor, addends: Addends | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of `x` [T, hidden] and `addends`, and what becomes of its norm."""
        return project(self.linear, x, addends, self.norm, self.act)


def project(
    linear: Linear,
    x: torch.Tensor,
    addends: Addends | None,
    norm: Norm | None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of `x` [T, hidden] and `addends`, and act(linear(norm(sum)))."""
    if len(x) in linear.fused and addends is not None and not isinstance(addends[0], ExpertParts):
        return _multiply(linear, x, addends, norm, act)
    summed, normed = add_and_normalise(x, addends, norm)
    out = linear(normed)
    return summed, out if act is None else act(out)


def multiply_by_kernel(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return [..., outputs] of one or two rows `x` [..., inputs]."""
    flat = x.reshape(-1, x.shape[-1])
    return _multiply(linear, flat, None, None, None)[1].view(*x.shape[:-1], -1)


def _multiply(
    linear: Linear,
    x: torch.Tensor,
    addends: Addends | None,
    norm: Norm | None,
    act: Activation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `project` does in one launch."""
    from tgi_trio.shard.torch_backend.kernels.few_rows import multiply_few  # imports Triton

    weight, bias, x = linear.weight, linear.bias, x.contiguous()
    launch = overlap(x.device)
    soon = linear.soon if launch["OVERLAPS"] else None
    rows, inputs = x.shape
    gate = _gate_of(act)
    outputs = len(weight) >> bool(gate)
    tile = choose_tile(inputs, rows, gated=bool(gate))
    summed = x if addends is None else torch.empty_like(x)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    programs = tile.programs * count_multiprocessors(x.device)
    multiply_few[(min(programs, -(-outputs // tile.outputs)),)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        summed,
        *addend_arguments(x, addends, norm),
        weight if soon is None else soon.weight,
        0 if soon is None else soon.weight.nbytes // _LINE >> soon.halves,
        outputs,
        ROWS=rows,
        INPUTS=inputs,
        PADDED=1 << (inputs - 1).bit_length(),
        HAS_BIAS=bias is not None,
        **addend_constants(addends),
        KIND="" if norm is None else norm.kind,
        HAS_GAIN=norm is not None and norm.weight is not None,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None,
        ACT=gate,
        OUTPUTS=tile.outputs,
        AHEAD=0 if soon is None else _AHEAD,
        SOON_HALVES=soon is not None and soon.halves,
        THREADS=32 * WARPS,
        **launch,
        num_warps=WARPS,
    )
    return summed, out if act is None or gate else act(out)


def choose_for_few_rows(
    linears: Iterable[Linear], projections: Iterable[Projection], seconds: Seconds
) -> None:
    """Have each plain half-precision matrix multiply few rows the way that takes less.

    Then, of each of `projections`, whose linears are among the first, whether what lies around the
    product is done in its launch. Matrices of a shape are measured one behind the other, as a step
    reads them: none is found in a cache because it has been read before.
    """
    alike: dict[tuple[object, ...], list[Linear]] = defaultdict(list)
    for linear in linears:
        if type(linear) is Linear and _fits(linear):
            linear.few_rows, linear.fused = {}, frozenset()
            alike[_kind(linear)].append(linear)
    for group in alike.values():
        for rows in _PROGRAMS:
            _choose_product(group, rows, seconds)
    projections = list(projections)
    for each in projections:
        if each.after is not None:
            each.after.soon = Soon(each.linear.weight, bool(_gate_of(each.act)))
    around: dict[tuple[object, ...], list[Projection]] = defaultdict(list)
    for each in projections:
        if type(each.linear) is Linear and _fits(each.linear):
            constants = addend_constants(each.like)
            gate = _gate_of(each.act)
            around[(*_kind(each.linear), *constants.values(), gate)].append(each)
    for several in around.values():
        for rows in _PROGRAMS:
            _choose_fusing(several, rows, seconds)


def _fits(linear: Linear) -> bool:
    """Return whether the kernel takes a matrix, which codes and adapters do not make another."""
    weight = linear.weight
    half = weight.dtype.itemsize == 2 and linear.packed is None
    return half and weight.numel() >= _LEAST and weight.shape[1] <= _MOST_INPUTS


def _gate_of(act: Activation | None) -> str:
    """Return the name of a gate that the kernel applies; "": none, or none that it knows."""
    if not isinstance(act, Gate) or act.limit or act.paired:
        return ""
    return act.kernel


def _kind(linear: Linear) -> tuple[object, ...]:
    return (*linear.weight.shape, linear.weight.dtype, linear.bias is None)


def _choose_product(linears: list[Linear], rows: int, seconds: Seconds) -> None:
    weight = linears[0].weight
    x = torch.zeros((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)

    def run(multiply: Callable[[Linear, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return [multiply(linear, x) for linear in linears][-1]

    library = seconds(partial(run, Linear.__call__))
    if seconds(partial(run, multiply_by_kernel)) < _WORTH * library:
        for linear in linears:
            linear.few_rows[rows] = multiply_by_kernel


def _choose_fusing(projections: list[Projection], rows: int, seconds: Seconds) -> None:
    weight = projections[0].linear.weight
    x = torch.zeros((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    addends = projections[0].like._replace(first=x)

    def run() -> torch.Tensor:
        return [each(x, addends) for each in projections][-1][1]

    def tell(*, fused: bool) -> None:
        for each in projections:
            each.linear.fused = each.linear.fused - {rows} | ({rows} if fused else set())

    apart = seconds(run)
    tell(fused=True)
    tell(fused=seconds(run) < _WORTH * apart)
