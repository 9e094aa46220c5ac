"""Linears whose rows have LoRA adapters on a device: y = x W^T + b, then B (A x) of each row's.

What a step's rows have is listed in *tiles*, neighbouring rows of one adapter; two launches add
what all of them change, in place, behind the linear's own product, plain or of codes. Where no row
has any, nothing is launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.adapter_layout import SitePlace
from tgi_trio.shard.torch_backend.layers.linear import Linear, WrappedLinear


class AdapterTile(NamedTuple):
    """What programs compute together: powers of two."""

    rows: int
    ranks: int  # of a program that multiplies by A, at most
    inputs: int  # multiplied together
    outputs: int  # of a program that multiplies by B
    warps: int
    stages: int


class AdapterTiles(NamedTuple):
    """Those for decodes and other small steps, and those for prefills."""

    few: AdapterTile
    many: AdapterTile


FEW_TOKENS: Final = 64  # a step of at most as many has small tiles, as decodes always have
_TILES: Final = AdapterTiles(AdapterTile(16, 16, 128, 64, 4, 4), AdapterTile(64, 64, 64, 128, 8, 3))
# Numbers of four bytes are not for the tensor cores, and take twice the registers.
_WIDE_TILES: Final = AdapterTiles(
    AdapterTile(16, 16, 64, 32, 4, 2), AdapterTile(32, 16, 32, 64, 4, 2)
)
# Programs share the inputs of a row: by so many inputs, and up to so many programs.
_LEAST_INPUTS = 512
_MOST_PARTS = 8
_PROGRAMS = 512
RANKS_TOGETHER: Final = 16  # of B


def choose_adapter_tiles(dtype: torch.dtype) -> AdapterTiles:
    """Return the tiles for numbers of a dtype."""
    return _WIDE_TILES if dtype.itemsize > 2 else _TILES


@dataclass(frozen=True, slots=True, eq=False)
class ReservedTiles:
    """Where a recording is told which of its tokens have which adapters."""

    memory: torch.Tensor  # uint8
    tiles: torch.Tensor  # int32 [n, 3], a view of it; those that are not needed have no tokens
    tile: AdapterTile  # the kind they are


@dataclass(slots=True)
class SlotMemory:
    """The adapters that are on the device, and which rows of the step at hand have which."""

    numbers: torch.Tensor  # [slots, capacity], see `SlotLayout`
    directory: torch.Tensor  # int32 [slots, entries, 4]
    ranks: int  # the largest, aligned
    tiles: torch.Tensor | None = None  # int32 [n, 3]: slot, first token, tokens; None: no rows
    tile: AdapterTile | None = None  # the kind they are


class SlottedLinear(WrappedLinear):
    """A linear, and what the adapters of a step's rows add to it."""

    __slots__ = ("_memory", "_place")

    def __init__(self, base: Linear, place: SitePlace, memory: SlotMemory) -> None:
        super().__init__(base)
        self._place = place
        self._memory = memory

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        memory = self._memory
        if memory.tiles is not None and memory.tile is not None:
            add_adapters(y, x.contiguous(), self._place, memory, memory.tiles, memory.tile)
        return y

    def compile(self, tile: AdapterTile) -> None:
        """Compile what steps will launch with tiles of a kind, by one program that does nothing."""
        place, numbers = self._place, self._memory.numbers
        x = numbers.new_zeros((1, place.inputs))
        y = numbers.new_zeros((1, place.outputs))
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=numbers.device)
        add_adapters(y, x, place, self._memory, tiles, tile, only_one=True)


def count_shares(tile: AdapterTile, tokens: int, inputs: int) -> int:
    """Return how many programs share a row's inputs.

    By the step's size alone: whose else the rows are must not change the order of a row's sums.
    """
    most = max(1, min(inputs // _LEAST_INPUTS, _MOST_PARTS))
    return max(1, min(most, _PROGRAMS // -(-tokens // tile.rows)))


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    place: SitePlace,
    memory: SlotMemory,
    tiles: torch.Tensor,
    tile: AdapterTile,
    *,
    only_one: bool = False,
) -> None:
    """Add to `y` [T, outputs] what rows of `x` [T, inputs] get from their adapters, in place.

    Both contiguous; `tiles` int32 [n, 3] of rows of the kind `tile`; `only_one`: one program of
    each launch, for the compiler.
    """
    from tgi_trio.shard.torch_backend.kernels import adapters as kernels  # imports Triton

    tokens, pieces, ranks = len(x), len(place.starts), memory.ranks
    parts = count_shares(tile, tokens, place.inputs)
    step = min(tile.ranks, ranks & -ranks)  # the largest power of two that divides
    low = torch.empty((parts, tokens, pieces, ranks), dtype=torch.float32, device=x.device)
    where = (memory.numbers, memory.directory, tiles, tokens)
    slot = (memory.numbers.stride(0), memory.directory.shape[1], place.first)
    grid = (len(tiles), pieces * (ranks // step), parts)
    kernels.shrink_rows[(1, 1, 1) if only_one else grid](
        low,
        x,
        *where,
        place.inputs,
        *slot,
        PIECES=pieces,
        RANKS=ranks,
        ROWS=tile.rows,
        STEP=step,
        DEPTH=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    starts = (*place.starts[1:], place.outputs, place.outputs)
    kernels.expand_rows[(1, 1) if only_one else (len(tiles), -(-place.outputs // tile.outputs))](
        y,
        low,
        *where,
        place.outputs,
        *slot,
        starts[0],
        starts[1],
        parts,
        PIECES=pieces,
        RANKS=ranks,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=RANKS_TOGETHER,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
