"""Values times the sigmoid of gates, in one launch on a device.

Gates of low rank are multiplied in the same launch, so they are never written.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.compiling.ahead import compile_beside
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels

BLOCK: Final = 1024  # values of a program


def open_values(
    values: torch.Tensor, gates: torch.Tensor, *, in_float32: bool = False
) -> torch.Tensor:
    """Return `values` [T, size] times sigmoid(`gates`), [T, size] or one for neighbouring values.

    `in_float32`: opened gates are not rounded to the dtype before they multiply.
    """
    if runs_kernels(values.device):
        return _launch(values, gates, in_float32=in_float32)
    opened = (gates.float() if in_float32 else gates).sigmoid()
    each = values.shape[-1] // gates.shape[-1]
    found: torch.Tensor = values.unflatten(-1, (-1, each)) * opened[..., None]
    return found.flatten(-2).to(values.dtype)


def _launch(values: torch.Tensor, gates: torch.Tensor, *, in_float32: bool) -> torch.Tensor:
    from tgi_trio.shard.torch_backend.kernels import activations  # imports Triton

    tokens, size = values.shape
    values, gates = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, gates))
    out = torch.empty((tokens, size), dtype=values.dtype, device=values.device)
    activations.open_values[(tokens, -(-size // BLOCK))](
        *(out, values, gates, values.stride(0), gates.stride(0)),
        SIZE=size,
        EACH=size // gates.shape[-1],
        BLOCK=BLOCK,
        ROUNDS=not in_float32,
        **overlap(values.device),
    )
    return out


class NarrowTile(NamedTuple):
    """The tile of a program that opens gates of low rank; its sizes are powers of two."""

    tokens: int
    gates: int  # of all hidden states together
    warps: int = 4
    stages: int = 4


_FEW: Final = NarrowTile(16, 64)  # a decode: many programs share the matrix
_MANY: Final = NarrowTile(128, 128, warps=8, stages=3)
_SOME: Final = NarrowTile(64, 64, stages=3)
_WIDE: Final = NarrowTile(32, 64, stages=2)  # float32 does not use the tensor cores
_FEW_TOKENS: Final = 32
_SOME_TOKENS: Final = 256
STEPS: Final = (1, _SOME_TOKENS, _SOME_TOKENS + 1)  # numbers of tokens, one for each tile
_DEPTH: Final = 64  # numbers of a rank that are multiplied at a time


def choose_narrow_tile(dtype: torch.dtype, tokens: int) -> NarrowTile:
    """Return the tile for numbers of a dtype and a step's tokens."""
    if tokens <= _FEW_TOKENS:
        return _FEW
    if dtype.itemsize > 2:
        return _WIDE
    return _SOME if tokens <= _SOME_TOKENS else _MANY


def narrow_constants(tile: NarrowTile, rank: int, count: int) -> dict[str, int]:
    """Return constants of `open_narrow` that follow from a tile and from the gates' shape."""
    streams, depth = (next_power_of_2(n) for n in (count, max(16, min(rank, _DEPTH))))
    block = max(1, tile.gates // streams)
    return {"TOKENS": tile.tokens, "BLOCK": block, "STREAMS": streams, "DEPTH": depth}


def opens_narrow(gates: Linear, device: torch.device) -> bool:
    """Return whether the product with the matrix of `gates` can be part of the launch."""
    plain = type(gates) is Linear and gates.bias is None and gates.packed is None
    return plain and not gates.invariant and not gates.few_rows and runs_kernels(device)


def open_narrow(
    values: torch.Tensor, narrow: torch.Tensor, gates: Linear, *, count: int, rounds: bool
) -> torch.Tensor:
    """Return the mean over a token's `count` hidden states of their numbers times opened gates.

    `values`: [T, count * size], contiguous; `narrow` [T, rank], of which gates are made: they are
    gates(silu(narrow / count)). `rounds`: opened gates are rounded before they multiply.
    """
    from tgi_trio.shard.torch_backend.kernels.streams import gated_streams  # imports Triton

    tokens, rank = narrow.shape
    size = values.shape[1] // count
    tile = choose_narrow_tile(values.dtype, tokens)
    constants = narrow_constants(tile, rank, count)
    out = torch.empty((tokens, size), dtype=values.dtype, device=values.device)
    grid = (-(-size // constants["BLOCK"]), -(-tokens // tile.tokens))
    gated_streams.open_narrow[grid](
        *(out, narrow, gates.weight, values.contiguous(), tokens),
        STRIDE=narrow.stride(0),
        RANK=rank,
        SIZE=size,
        COUNT=count,
        ROUNDS=rounds,
        **constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def compile_narrow(gates: Linear, stride: int, *, count: int, rounds: bool) -> None:
    """Start compiling what `open_narrow` launches for any number of tokens.

    `stride`: the numbers between tokens of what gates are made of; the rest as for `open_narrow`.
    """
    weight = gates.weight
    outputs, rank = weight.shape

    def launch_each() -> None:
        for tokens in STEPS:
            values, narrow = weight.new_zeros(tokens, outputs), weight.new_zeros(tokens, stride)
            open_narrow(values, narrow[:, :rank], gates, count=count, rounds=rounds)

    kind = ("open_narrow", weight.dtype, outputs, rank, stride, count, rounds)
    compile_beside(weight.device, launch_each, kind)
