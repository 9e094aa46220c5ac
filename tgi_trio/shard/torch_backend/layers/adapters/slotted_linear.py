"""Linear layers with LoRA adapters on a device: y = x W^T + b, plus B (A x) of each row's adapter.

A step's adapters are listed as *tiles*, neighbouring rows with the same adapter. After the linear's
own product, plain or of codes, two launches add the contributions of all tiles in place. If no row
has an adapter, nothing is launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import SitePlace
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear, WrappedLinear


class AdapterTile(NamedTuple):
    """Sizes of the work of a program; powers of two."""

    rows: int
    ranks: int  # most ranks of a program that multiplies by A
    inputs: int  # of one step of the loop
    outputs: int  # of a program that multiplies by B
    warps: int
    stages: int


class AdapterTiles(NamedTuple):
    """The tiles of decodes and other small steps, and those of prefills."""

    few: AdapterTile
    many: AdapterTile


FEW_TOKENS: Final = 64  # steps of at most as many have small tiles, and decodes always do
_TILES: Final = AdapterTiles(AdapterTile(16, 16, 128, 64, 4, 4), AdapterTile(64, 64, 64, 128, 8, 3))
# float32 does not use the tensor cores, and takes twice the registers.
_WIDE_TILES: Final = AdapterTiles(
    AdapterTile(16, 16, 64, 32, 4, 2), AdapterTile(32, 16, 32, 64, 4, 2)
)
# Programs share the inputs of a row (split-K): at least so many inputs each, and so many programs.
_LEAST_INPUTS = 512
_MOST_PARTS = 8
_PROGRAMS = 512
RANKS_TOGETHER: Final = 16  # of B, in one step of the loop


def choose_adapter_tiles(dtype: torch.dtype) -> AdapterTiles:
    """Return the tiles for a dtype."""
    return _WIDE_TILES if dtype.itemsize > 2 else _TILES


@dataclass(frozen=True, slots=True, eq=False)
class ReservedTiles:
    """The memory from which a recording reads which of its tokens have which adapters."""

    memory: torch.Tensor  # uint8
    tiles: torch.Tensor  # int32 [n, 3], a view of `memory`; unused tiles have no tokens
    chosen: torch.Tensor  # the same for the rows that the head reads
    tile: AdapterTile  # the kind of all of them


@dataclass(slots=True)
class SlotMemory:
    """The adapters on the device, and which rows of the present step use which."""

    numbers: torch.Tensor  # [slots, capacity], see `SlotLayout`
    directory: torch.Tensor  # int32 [slots, entries, 5]
    ranks: int  # the largest of any adapter, aligned
    invariant: bool = False  # see `batch_invariance.py`
    tiles: torch.Tensor | None = None  # int32 [n, 3]: slot, first token, tokens; None: no adapters
    chosen: torch.Tensor | None = None  # int32 [n, 3]: the same for the rows that the head reads
    tile: AdapterTile | None = None  # the kind of all of them


class SlottedLinear(WrappedLinear):
    """A linear layer that adds the adapters of a step's rows."""

    __slots__ = ("_is_head", "_memory", "_place", "_starts")

    def __init__(
        self, base: Linear, place: SitePlace, memory: SlotMemory, *, is_head: bool = False
    ) -> None:
        super().__init__(base)
        self._is_head = is_head
        self._place = place
        self._memory = memory
        self._starts = place_starts(place, memory.numbers.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        memory = self._memory
        tiles = memory.chosen if self._is_head else memory.tiles
        if tiles is not None and memory.tile is not None:
            found = tiles, memory.tile
            add_adapters(y, x.contiguous(), self._place, self._starts, memory, *found)
        return y

    def compile(self, tile: AdapterTile) -> None:
        """Compile the kernels for a kind of tiles, by launching programs that do nothing.

        A head is multiplied without the norm before it where a row has an adapter, and in no other
        step: its products of few rows are launched as well, once it is known which are chosen.
        """
        place, numbers = self._place, self._memory.numbers
        x = numbers.new_zeros((1, place.inputs))
        y = numbers.new_zeros((1, place.outputs))
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=numbers.device)
        add_adapters(y, x, place, self._starts, self._memory, tiles, tile, only_one=True)
        for rows in self.base.few_rows if self._is_head else ():
            self.base(x.expand(rows, -1))


def place_starts(place: SitePlace, device: torch.device | str) -> torch.Tensor:
    """Return the first output of each piece, int32 [pieces]."""
    return torch.tensor(place.starts, dtype=torch.int32).to(device)


def count_shares(tile: AdapterTile, tokens: int, inputs: int, *, invariant: bool) -> int:
    """Return how many programs share a row's inputs (split-K).

    It depends on the step's size alone: other rows must not change the order of a row's sums.
    """
    most = max(1, min(inputs // _LEAST_INPUTS, _MOST_PARTS))
    tiles = -(-apparent_rows(tokens, invariant=invariant) // tile.rows)
    return max(1, min(most, _PROGRAMS // tiles))


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    place: SitePlace,
    starts: torch.Tensor,
    memory: SlotMemory,
    tiles: torch.Tensor,
    tile: AdapterTile,
    *,
    only_one: bool = False,
) -> None:
    """Add to `y` [T, outputs] the contributions of adapters for `x` [T, inputs], in place.

    Both are contiguous. `starts`: as `place_starts` returns them. `tiles`: int32 [n, 3], of the
    kind `tile`. `only_one`: launch single programs, to compile the kernels.
    """
    from tgi_trio.shard.torch_backend.kernels.adapters import (
        linear_adapters as kernels,  # imports Triton
    )

    tokens, pieces, ranks = len(x), len(place.starts), memory.ranks
    parts = count_shares(tile, tokens, place.inputs, invariant=memory.invariant)
    step = min(tile.ranks, ranks & -ranks)  # the largest power of two that divides `ranks`
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
    kernels.expand_rows[(1, 1) if only_one else (len(tiles), -(-place.outputs // tile.outputs))](
        y,
        low,
        *where,
        place.outputs,
        *slot,
        *(*place.starts[1:], place.outputs, place.outputs)[:2],
        starts,
        parts,
        PIECES=pieces,
        RANKS=ranks,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=RANKS_TOGETHER,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
