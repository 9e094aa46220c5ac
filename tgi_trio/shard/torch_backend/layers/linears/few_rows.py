"""Which matrices are multiplied by our kernels where there are few rows, and which by the library.

On an H200, for few rows, the library read the matrices of 1B and 8B models, except heads, at 32 to
93 % of the bandwidth. For one row, a kernel that includes the sum and norm before the product and
the gate after it (prologue and epilogue) read them at 66 to 96 %. The warm-up measures both on the
device that serves; the choice stays for the life of the process.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import Gate, activate
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import (
    Addends,
    add_and_normalise,
    addend_arguments,
    addend_constants,
)
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import (
    Generation,
    count_multiprocessors,
    generation,
    overlap,
)

# Numbers of rows that are treated alike; each class is measured at its largest.
FEW: Final = (range(1, 2), range(2, 3), range(3, 9), range(9, 17))
CLASSES: Final = (*FEW, range(17, 33), range(33, 65))
_LEAST: Final = 1 << 20  # numbers of the smallest matrix that is measured
_READ: Final = 2 << 30  # bytes of matrices alike that are enough to measure: far beyond any cache
_WORTH: Final = 0.97  # our kernel must take less than this part of the library's time
# Likewise for a norm alone in a product's launch: a launch is 2 % of a head's 130 us with 1B.
_WORTH_OF_NORM: Final = 0.99
_ROUNDED: Final = 1 / 32  # tolerated, of the largest number: some roundings of half precision
_MOST_OUTPUTS: Final = 1 << 16  # with more, the library is as fast for three rows or more
_LEFT: Final = "products of few rows are left to the library"

# `multiply_few`
WARPS: Final = 8
_SMALL, _LARGE = 32, 64  # weights that a thread loads at a time
_WIDE: Final = 4096  # with more inputs, a thread loads the larger number
# Programs of a multiprocessor, by rows: with small shares of the matrix and with large ones. Long
# rows take registers as well, which limits the programs.
_PROGRAMS: Final = {1: (4, 2), 2: (3, 1)}
_LONG_PROGRAMS: Final = 3
_MOST_INPUTS: Final = 1 << 14  # of a row that a program keeps in registers

# `multiply_several`
_NARROWEST: Final = 64  # outputs of the smallest tile
_ENOUGH: Final = 128  # with as many tiles, programs do not share them
_MOST_PARTS: Final = 4
_LEAST_PART: Final = 512  # inputs

Seconds = Callable[[Callable[[], torch.Tensor]], float]  # measures the device time of work


class FewTile(NamedTuple):
    """The outputs that a program of `multiply_few` computes at a time, and the programs at once."""

    outputs: int
    programs: int  # of a multiprocessor


class SeveralTile(NamedTuple):
    """The tile of a program of `multiply_several`; its sizes are powers of two."""

    rows: int
    outputs: int
    depth: int
    parts: int
    ahead: int
    warps: int


def choose_few_tile(inputs: int, rows: int, *, gated: bool, other: bool = False) -> FewTile:
    """Return a tile with 32 weights a thread, 64 for long rows; if `gated`, half are of gates.

    `other`: as near as possible to the opposite choice.
    """
    padded, threads, long = next_power_of_2(inputs), 32 * WARPS, inputs > _WIDE
    share = _LARGE if long != other else _SMALL
    outputs = max(1, share * threads // padded >> gated)
    programs = _PROGRAMS[rows][(outputs << gated) * padded > _SMALL * threads]
    return FewTile(outputs, min(programs, _LONG_PROGRAMS) if long else programs)


def choose_several_tile(
    rows: int, outputs: int, inputs: int, generation: Generation, *, gated: bool
) -> SeveralTile:
    """Return a tile that keeps enough loads of weights in flight within its shared memory.

    Every program reads all rows from the level 2 cache. For more than 32, it therefore has twice
    as many outputs where there are enough for that, so that weights stay most of what is read.
    """
    parts = min(_MOST_PARTS, next_power_of_2(max(1, inputs // _LEAST_PART)))
    wide = rows > 32 and not gated and outputs * parts >= 2 * _NARROWEST * _ENOUGH
    tile = 2 * _NARROWEST if wide else _NARROWEST
    depth = 64 if rows > 32 and (wide or gated) else 128
    # Stages: on devices with little shared memory as many as 99 KB hold.
    ahead = 4 if not gated or depth == 64 else 3
    if gated and rows <= 16 and generation == "ampere":
        ahead = 2
    padded = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if outputs >= tile * _ENOUGH:
        parts = 1
    return SeveralTile(padded, tile, depth, parts, ahead, 8 if wide else 4)


class Projection(NamedTuple):
    """A linear layer, with the norm before it and the activation after it."""

    linear: Linear
    norm: Norm | None
    act: Activation | None
    like: Addends | None  # the form of the sum before it; its tensors do not matter; None: no sum

    def __call__(self, x: torch.Tensor, addends: Addends | None) -> torch.Tensor:
        """Return act(linear(norm(x + addends))) of `x` [T, hidden]."""
        if self.norm is not None and self.like is None:
            return project_normed(self.linear, x, self.norm)
        return project(self.linear, x, addends, self.norm, self.act)[1]


def project(
    linear: Linear,
    x: torch.Tensor,
    addends: Addends | None,
    norm: Norm | None,
    act: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of `x` [T, hidden] and `addends`, and act(linear(norm(sum)))."""
    rows = len(x)
    if rows in linear.fused and addends is not None and addends.in_products:
        if rows in _PROGRAMS:
            return _multiply_few(linear, x, addends, norm, act)
        summed, normed = add_and_normalise(x, addends, norm)
        return summed, _multiply_several(linear, normed, act)
    summed, normed = add_and_normalise(x, addends, norm)
    out = linear(normed)
    return summed, out if act is None else activate(act, out)


def project_normed(linear: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return linear(norm(x)) of `x` [T, hidden], with no sum before it, as for a head."""
    if len(x) in linear.fused and len(x) in _PROGRAMS:
        return _multiply_few(linear, x, None, norm, None)[1]
    return linear(add_and_normalise(x, None, norm)[1])


def multiply_by_kernel(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return [..., outputs] of up to 64 rows `x` [..., inputs]."""
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) in _PROGRAMS:
        out = _multiply_few(linear, flat, None, None, None)[1]
    else:
        out = _multiply_several(linear, flat, None)
    return out.view(*x.shape[:-1], -1)


def _multiply_few(
    linear: Linear,
    x: torch.Tensor,
    addends: Addends | None,
    norm: Norm | None,
    act: Activation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `project` in one launch."""
    from tgi_trio.shard.torch_backend.kernels.linears.few_rows import multiply_few  # imports Triton

    x, gate = x.contiguous(), _gate_of(act)
    rows, inputs = x.shape
    summed = x if addends is None else torch.empty_like(x)
    out, constants = _prepare(linear, x, gate)
    outputs = out.shape[1]
    other = linear.other_share and rows == 1
    tile = choose_few_tile(inputs, rows, gated=bool(gate), other=other)
    programs = tile.programs * count_multiprocessors(x.device)
    multiply_few[(min(programs, -(-outputs // tile.outputs)),)](
        out,
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        summed,
        *addend_arguments(x, addends, norm),
        outputs,
        ROWS=rows,
        PADDED=next_power_of_2(inputs),
        **addend_constants(addends),
        **norm_constants(norm),
        OUTPUTS=tile.outputs,
        **constants,
        num_warps=WARPS,
    )
    return summed, out if act is None or gate else activate(act, out)


def norm_constants(norm: Norm | None) -> dict[str, bool | str]:
    """Return the compile-time constants of kernels that normalise what they multiply."""
    return {
        "KIND": "" if norm is None else norm.kind,
        "HAS_GAIN": norm is not None and norm.weight is not None,
        "HAS_NORM_BIAS": norm is not None and norm.bias is not None,
    }


def _multiply_several(linear: Linear, x: torch.Tensor, act: Activation | None) -> torch.Tensor:
    """Return act(linear(x)) for up to 64 rows."""
    from tgi_trio.shard.torch_backend.kernels.linears.several_rows import multiply_several

    x, gate = x.contiguous(), _gate_of(act)
    out, constants = _prepare(linear, x, gate)
    (rows, inputs), outputs = x.shape, out.shape[1]
    tile = choose_several_tile(rows, outputs, inputs, generation(x.device), gated=bool(gate))
    tiles = -(-outputs // tile.outputs)
    if linear.arrived is None:
        most = -(-len(linear.weight) // _NARROWEST)
        linear.arrived = torch.zeros(most, dtype=torch.int32, device=x.device)
    found = tiles * tile.parts * 2 * tile.outputs * tile.rows if tile.parts > 1 else 1
    sums = torch.empty(found, dtype=torch.float32, device=x.device)
    multiply_several[(tiles, tile.parts)](
        out,
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        sums,
        linear.arrived,
        rows,
        outputs,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        AHEAD=tile.ahead,
        **constants,
        num_warps=tile.warps,
    )
    return out if act is None or gate else activate(act, out)


def _prepare(linear: Linear, x: torch.Tensor, gate: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return memory for the output, and the constants that both kernels take."""
    outputs = len(linear.weight) >> bool(gate)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    constants = {"INPUTS": x.shape[1], "HAS_BIAS": linear.bias is not None, "ACT": gate}
    return out, constants | overlap(x.device)


def choose_for_few_rows(
    linears: Iterable[Linear],
    projections: Iterable[Projection],
    seconds: Seconds,
    *,
    lone: bool = False,
) -> None:
    """Choose the faster product for few rows, for each plain half-precision matrix.

    Then choose for each of `projections`, whose linears are among `linears`, whether its product's
    launch includes the norm, sum and gate around it. Matrices of the same shape are measured one
    after another, as a step reads them, so that none is still in a cache. `lone`: one matrix of
    each shape is enough, since nothing is measured.
    """
    alike: dict[tuple[object, ...], list[Linear]] = defaultdict(list)
    for linear in linears:
        if type(linear) is Linear and fits_few_rows(linear):
            linear.few_rows, linear.fused = {}, frozenset()
            alike[_kind(linear)].append(linear)
    around: dict[tuple[object, ...], list[Projection]] = defaultdict(list)
    for each in projections:
        if type(each.linear) is Linear and fits_few_rows(each.linear):
            constants, gate = addend_constants(each.like), _gate_of(each.act)
            around[(*_kind(each.linear), *constants.values(), gate)].append(each)
    for rows in CLASSES:
        for group in alike.values():
            if rows[-1] in _PROGRAMS or len(group[0].weight) <= _MOST_OUTPUTS:
                _choose_product(group, rows, seconds, lone)
        for several in around.values():
            if rows[-1] in _PROGRAMS or _gate_of(several[0].act):
                _choose_fusing(several, rows, seconds, lone)


def _enough(linear: Linear, lone: bool) -> int:
    """Return how many matrices like this one are measured."""
    return 1 if lone else max(2, _READ // linear.weight.nbytes)


def fits_few_rows(linear: Linear) -> bool:
    """Return whether the kernels can multiply by a plain matrix like this one."""
    weight = linear.weight
    half = weight.dtype.itemsize == 2 and linear.packed is None
    return half and weight.numel() >= _LEAST and weight.shape[1] <= _MOST_INPUTS


def _gate_of(act: Activation | None) -> str:
    """Return the name of a gate that the kernels apply; "" if there is none that they know."""
    if not isinstance(act, Gate) or act.limit or act.paired:
        return ""
    return act.kernel


def _kind(linear: Linear) -> tuple[object, ...]:
    return (*linear.weight.shape, linear.weight.dtype, linear.bias is None)


def _choose_product(linears: list[Linear], rows: range, seconds: Seconds, lone: bool) -> None:
    x = try_rows(linears[0].weight, rows[-1])
    some = linears[: _enough(linears[0], lone)]

    def run(multiply: Callable[[Linear, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return [multiply(linear, x) for linear in some][-1]

    library = seconds(partial(run, Linear.__call__))
    less = seconds(partial(run, multiply_by_kernel)) < _WORTH * library
    if less and agree(run(multiply_by_kernel), run(Linear.__call__), _LEFT):
        for linear in linears:
            linear.few_rows |= dict.fromkeys(rows, multiply_by_kernel)


def _choose_fusing(
    projections: list[Projection], rows: range, seconds: Seconds, lone: bool
) -> None:
    x, like = try_rows(projections[0].linear.weight, rows[-1]), projections[0].like
    addends = None
    if like is not None:
        addends = like._replace(first=x, second=None if like.second is None else x)
    some = projections[: _enough(projections[0].linear, lone)]

    def run() -> torch.Tensor:
        return [each(x, addends) for each in some][-1]

    apart, wanted = seconds(run), run()
    for each in projections:
        each.linear.fused |= set(rows)
    worth = _WORTH_OF_NORM if like is None else _WORTH
    if seconds(run) >= worth * apart or not agree(run(), wanted, _LEFT):
        for each in projections:
            each.linear.fused -= set(rows)


def try_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return varied test inputs [rows, inputs] for a matrix."""
    shape = (rows, weight.shape[1])
    count = torch.arange(shape[0] * shape[1], device=weight.device, dtype=torch.float32)
    return count.sin().to(weight.dtype).view(shape)


def agree(found: torch.Tensor, wanted: torch.Tensor, left: str) -> bool:
    """Return whether two results agree up to rounding; if not, print what things are `left` to.

    On a compiler or a device that nobody has tried a kernel may be wrong, and is then not used.
    """
    wide = wanted.float()
    apart = (found.float() - wide).abs().max()
    if bool(apart <= _ROUNDED * wide.abs().max()):
        return True
    print(f"{left}: what was to replace it found other numbers", file=sys.stderr, flush=True)
    return False
