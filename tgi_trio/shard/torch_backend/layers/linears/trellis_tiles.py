"""The tiles of products with EXL3's matrices, by device and dtype."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.torch_device import Generation


class TrellisTile(NamedTuple):
    """The tile of a program of `multiply_turned`: all outputs of a block."""

    rows: int  # a power of two; up to as many it is for, but the last one for more
    depth: int  # inputs of one step of the loop, likewise, at most 128
    warps: int
    stages: int


_TILES: Final[dict[Generation, tuple[TrellisTile, ...]]] = {
    "ampere": (TrellisTile(16, 64, 8, 2), TrellisTile(64, 32, 8, 2), TrellisTile(128, 64, 8, 2)),
    "hopper": (
        TrellisTile(16, 64, 8, 3),
        TrellisTile(32, 64, 8, 3),
        TrellisTile(64, 64, 8, 2),
        TrellisTile(128, 64, 8, 2),
    ),
}
# float32 does not use the tensor cores, which a library would not either.
_WIDE_TILES: Final = (TrellisTile(16, 32, 8, 2), TrellisTile(32, 32, 8, 2))
_MOST_OF_GROUPS: Final = 64  # rows of a tile of experts
# Rows of a launch, all tiles together. In half precision, numbers are written for a library with
# more: by then a product of ours decodes them as often as writing and reading them takes.
MOST_ROWS: Final = 256
FEW: Final = (1, 2)  # rows for which programs turn inputs themselves, and multiply in float32
_SHORT_RUNS: Final = 11  # half bits of a weight from which runs are of two weights, not four
TURNED_ROWS: Final = 16  # of a program of `turn_inputs`
TURN_WARPS: Final = 4
WRITTEN: Final = TrellisTile(128, 64, 8, 2)  # of `turn_and_write`; its rows are outputs
WRITTEN_STEPS: Final = 8  # of a program


def choose_trellis_tiles(dtype: torch.dtype, generation: Generation) -> tuple[TrellisTile, ...]:
    """Return the tiles for numbers of a dtype, by ascending numbers of rows."""
    return _WIDE_TILES if dtype.itemsize > 2 else _TILES[generation]


def choose_expert_tiles(
    dtype: torch.dtype, generation: Generation
) -> tuple[TrellisTile, TrellisTile]:
    """Return the tiles of experts' matrices, for few rows of each and for many."""
    tiles = [t for t in choose_trellis_tiles(dtype, generation) if t.rows <= _MOST_OF_GROUPS]
    return tiles[0], tiles[-1]


def count_few_warps(rows: int, half_bits: int) -> int:
    """Return the warps of a program of few rows; with short runs two rows fill more registers."""
    return 16 if rows > 1 and half_bits >= _SHORT_RUNS else 8
