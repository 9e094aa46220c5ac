"""Which matrices a lone row is multiplied with by our kernel, and which by the library.

An H100 has shown (bench/results/h100-device.json) that the library reads the matrices of an 8B
model at 65 to 90 % of the bandwidth for one row, and a kernel that does nothing else at 83 to
100 %; and for one of them, 4096 outputs of 14336 inputs, at no more than the library. So what is
taken is measured at the warm-up, on the device that serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.linear import Linear


class RowTile(NamedTuple):
    """What a program of `multiply_row` computes; powers of two."""

    outputs: int
    depth: int  # inputs looked at together


TILES: Final = (RowTile(2, 1024), RowTile(4, 1024))
_LEAST: Final = 1 << 20  # numbers of a matrix that is worth a look
_WORTH: Final = 0.97  # of the library's time, from which on ours is taken

Seconds = Callable[[Callable[[], torch.Tensor]], float]  # that some work takes on the device


def multiply_by_kernel(linear: Linear, x: torch.Tensor, tile: RowTile) -> torch.Tensor:
    """Return [1, outputs] of `x` [1, inputs]."""
    from tgi_trio.shard.torch_backend.kernels.one_row import multiply_row  # imports Triton

    weight, bias = linear.weight, linear.bias
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    multiply_row[(-(-outputs // tile.outputs),)](
        out,
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
    )
    return out


def choose_for_one_row(linears: Iterable[Linear], seconds: Seconds) -> None:
    """Have each plain half-precision matrix multiply a lone row the way that takes less.

    Matrices of a shape are measured one behind the other, as a step reads them: none is found in
    a cache because it has been read before.
    """
    alike: dict[tuple[object, ...], list[Linear]] = defaultdict(list)
    for linear in linears:
        if type(linear) is not Linear or linear.packed is not None:
            continue  # it multiplies codes, or adds what adapters make of a row
        linear.one_row = None
        weight = linear.weight
        if weight.dtype.itemsize == 2 and weight.numel() >= _LEAST:
            alike[(*weight.shape, weight.dtype, linear.bias is None)].append(linear)
    for group in alike.values():
        tile = _choose_tile(group, seconds)
        if tile is not None:
            for linear in group:
                linear.one_row = partial(multiply_by_kernel, tile=tile)


def _choose_tile(linears: list[Linear], seconds: Seconds) -> RowTile | None:
    """Return the tile that multiplies matrices of a shape faster than the library; None: none."""
    weight = linears[0].weight
    x = torch.zeros((1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    least, best = _WORTH * seconds(partial(_multiply_all, linears, x, None)), None
    for tile in TILES:
        took = seconds(partial(_multiply_all, linears, x, tile))
        if took < least:
            least, best = took, tile
    return best


def _multiply_all(linears: list[Linear], x: torch.Tensor, tile: RowTile | None) -> torch.Tensor:
    out = x
    for linear in linears:
        out = linear(x) if tile is None else multiply_by_kernel(linear, x, tile)
    return out
