"""From what heads have read of latents to their values, times gates: in one launch on a device.

That is a product with a matrix for each head. A library computes it where nothing is merged and
there are no gates.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.linears.plain_product import multiply_by_head
from tgi_trio.shard.torch_backend.layers.opening import open_values
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

# Tokens and parts for which kernels differ: by the tile, and by what is merged.
_KINDS: Final = ((1, 32), (2, 32), (3, 16), (5, 8), (9, 4), (17, 2), (33, 1))


class AttendedParts(NamedTuple):
    """What programs that shared contexts have read of latents, not merged yet: running softmaxes.

    There are as many parts of each head of a token, a power of two.
    """

    sums: torch.Tensor  # float32 [T, heads, parts, rank], contiguous
    bests: torch.Tensor  # float32 [T, heads, parts]: largest score, in base 2
    masses: torch.Tensor  # float32 [T, heads, parts]: sum of 2 ** (score - best)
    dtype: torch.dtype  # of the model


class ExpandingTile(NamedTuple):
    """The tile of a program; its sizes are powers of two."""

    rows: int  # parts of tokens
    outputs: int
    depth: int = 64
    warps: int = 4
    stages: int = 3


_FEW: Final = ExpandingTile(32, 64)
_MANY: Final = ExpandingTile(64, 128, warps=8)
_WIDE: Final = ExpandingTile(32, 32, depth=32)  # float32 does not use the tensor cores


def choose_expanding_tile(dtype: torch.dtype, rows: int) -> ExpandingTile:
    """Return the tile for numbers of a dtype, and so many parts of a head."""
    if dtype.itemsize > 2:
        return _WIDE
    return _FEW if rows <= _FEW.rows else _MANY


def expand_values(
    read: torch.Tensor | AttendedParts,
    weight: torch.Tensor,
    gates: torch.Tensor | None,
    *,
    invariant: bool,
) -> torch.Tensor:
    """Return values [T, heads * value_dim] of latents [T, heads, rank], or of parts of them.

    `weight`: [heads, rank, value_dim]; `gates` [T, heads * value_dim], or [T, heads], whose
    sigmoids multiply values.
    """
    if isinstance(read, AttendedParts):
        return _launch(read, read.dtype, weight, gates)
    if gates is not None and not invariant and runs_kernels(read.device):
        return _launch(
            read if read.stride(2) == 1 else read.contiguous(), read.dtype, weight, gates
        )
    values = multiply_by_head(read, weight, invariant=invariant).flatten(1)
    return values if gates is None else open_values(values, gates)


def compile_expanding(weight: torch.Tensor, each: int) -> None:
    """Start compiling what `expand_values` launches for any number of tokens.

    `each`: the neighbouring values that a gate opens, 0 if there are no gates.
    """
    heads, rank, size = weight.shape

    def launch_each() -> None:
        for tokens, parts in _KINDS:
            gates = weight.new_zeros(tokens, heads * size // each) if each else None
            sums = weight.new_zeros((tokens, heads, parts, rank), dtype=torch.float32)
            read: torch.Tensor | AttendedParts = weight.new_zeros(tokens, heads, rank)
            if parts > 1:
                bests = sums[..., 0].contiguous()
                read = AttendedParts(sums, bests, bests, weight.dtype)
            if parts > 1 or each:
                expand_values(read, weight, gates, invariant=False)

    if runs_kernels(weight.device):
        kind = ("expand_values", weight.dtype, tuple(weight.shape), each)
        compile_beside(weight.device, launch_each, kind)


def _launch(
    read: torch.Tensor | AttendedParts,
    dtype: torch.dtype,
    weight: torch.Tensor,
    gates: torch.Tensor | None,
) -> torch.Tensor:
    from tgi_trio.shard.torch_backend.kernels.attention import expanding  # imports Triton

    parts, merges = 1, isinstance(read, AttendedParts)
    if isinstance(read, AttendedParts):
        sums, bests, masses, _ = read
        parts = sums.shape[2]
    else:
        sums = bests = masses = read
    heads, rank, size = weight.shape
    if gates is not None and gates.stride(1) != 1:
        gates = gates.contiguous()
    tokens, opening = len(sums), sums if gates is None else gates
    tile = choose_expanding_tile(dtype, tokens * parts)
    rows = max(tile.rows, parts)
    out = torch.empty((tokens, heads * size), dtype=dtype, device=weight.device)
    grid = (heads, -(-size // tile.outputs), -(-tokens // (rows // parts)))
    expanding.expand_values[grid](
        *(out, sums, bests, masses, weight.contiguous(), opening),
        *(tokens, sums.stride(0), sums.stride(1), opening.stride(0)),
        HEADS=heads,
        RANK=rank,
        VALUE=size,
        MERGES=merges,
        PARTS=parts,
        EACH=0 if gates is None else heads * size // gates.shape[1],
        ROWS=rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
