"""Products with plain matrices: by a library, or by a kernel whose sums are always in one order.

A library chooses how to multiply by the number of rows. Where batch invariance is kept, a kernel of
ours multiplies any number of rows in the same way (`kernels/linears/any_rows.py`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.torch_device import Generation, generation, runs_kernels


class AnyTile(NamedTuple):
    """The tile of all programs of `multiply_any`; its sizes are powers of two."""

    rows: int
    outputs: int
    depth: int
    warps: int = 4
    stages: int = 3


# One for all numbers of rows: a matrix of weights is read as fast by decodes as the device can, and
# prompts have tiles of half the size that would be fastest for them.
_TILES: Final[dict[Generation, AnyTile]] = {
    "ampere": AnyTile(64, 128, 64),
    "hopper": AnyTile(64, 128, 64, stages=4),
}
# Of matrices of heads, whose outputs lie together: those of many outputs would fill the registers.
_HEADS_TILE: Final = AnyTile(64, 64, 64)
_WIDE_TILE: Final = AnyTile(32, 64, 32)  # float32 does not use the tensor cores
# Inputs are divided into parts while a row of tiles has fewer, for programs to share at few rows.
_ENOUGH: Final = 128
_MOST_PARTS: Final = 8
_LEAST_PART: Final = 512  # inputs
_FEW_ROWS: Final = 256  # up to which each part has a program; more rows are programs enough
_BLOCK: Final = 256  # outputs of a program of `add_parts`


def choose_any_tile(
    dtype: torch.dtype, generation: Generation, *, by_head: bool = False
) -> AnyTile:
    """Return the tile for numbers of a dtype, and for one matrix or one for each head."""
    half = _HEADS_TILE if by_head else _TILES[generation]
    return half if dtype.itemsize == 2 else _WIDE_TILE


def count_input_parts(outputs: int, inputs: int, tile: AnyTile) -> int:
    """Return the parts into which the inputs of a matrix are divided: a power of two."""
    parts, tiles = 1, -(-outputs // tile.outputs)
    most = min(_MOST_PARTS, inputs // _LEAST_PART)
    while tiles * parts < _ENOUGH and 2 * parts <= most:
        parts *= 2
    return parts


def multiply_plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, invariant: bool
) -> torch.Tensor:
    """Return x W^T + b [..., outputs] of `x` [..., inputs], `weight` [outputs, inputs]."""
    if not invariant or not runs_kernels(x.device):
        return functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty((len(flat), len(weight)), dtype=x.dtype, device=x.device)
    if len(flat):
        _launch(out[None], flat[None], weight[None], bias, by_head=False)
    return out.view(*x.shape[:-1], len(weight))


def multiply_by_head(x: torch.Tensor, weight: torch.Tensor, *, invariant: bool) -> torch.Tensor:
    """Return the products [T, heads, outputs] of `x` [T, heads, inputs] with a matrix a head.

    `weight`: [heads, inputs, outputs].
    """
    heads, _, outputs = weight.shape
    out = torch.empty((len(x), heads, outputs), dtype=x.dtype, device=x.device)
    if invariant and runs_kernels(x.device) and x.stride(2) == 1:
        weight = weight.transpose(1, 2)
        _launch(out.transpose(0, 1), x.transpose(0, 1), weight, None, by_head=True)
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    by_head: bool,
) -> None:
    """Write x W^T + b to `out` [B, rows, outputs] for `x` [B, rows, inputs], each with a matrix.

    `weight`: [B, outputs, inputs]. Only inputs of `x` and outputs of `out` need lie together.
    """
    from tgi_trio.shard.torch_backend.kernels.linears.any_rows import multiply_any  # imports Triton
    from tgi_trio.shard.torch_backend.kernels.linears.codes import add_parts

    batches, rows, inputs = x.shape
    outputs = weight.shape[1]
    tile = choose_any_tile(x.dtype, generation(x.device), by_head=by_head)
    parts = 1 if by_head else count_input_parts(outputs, inputs, tile)
    divided = parts > 1 and rows <= _FEW_ROWS
    sums = out
    if divided:
        sums = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    tiles = -(-outputs // tile.outputs), -(-rows // tile.rows)
    # 0 for a single product: else the kernel would be compiled for some numbers of rows.
    batch = [0 if batches == 1 else each.stride(0) for each in (out, x, weight)]
    multiply_any[(*tiles, parts if divided else batches)](
        out,
        sums,
        x,
        weight,
        x if bias is None or divided else bias,
        rows,
        outputs,
        *(batch[0], out.stride(1), batch[1], x.stride(1), batch[2], *weight.stride()[1:]),
        INPUTS=inputs,
        HAS_BIAS=bias is not None and not divided,
        DIVIDED=divided,
        PARTS=parts,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if divided:
        add_parts[(rows, -(-outputs // _BLOCK))](
            out,
            sums,
            sums if bias is None else bias,
            rows,
            parts,
            outputs,
            out.stride(1),
            HAS_BIAS=bias is not None,
            BLOCK=_BLOCK,
        )
