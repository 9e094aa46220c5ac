"""The tiles of products with weights that stay quantised, by device, dtype and kind of codes."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.layers.linears.stored_codes import KINDS
from tgi_trio.shard.torch_backend.torch_device import Generation


class CodeTile(NamedTuple):
    """The tile of a program of `multiply_codes`; its sizes are powers of two."""

    most: int  # largest number of rows that it is for
    outputs: int
    rows: int
    depth: int  # inputs of one step of the loop
    warps: int
    stages: int
    divided: bool  # programs may share a tile (split-K)


class FewCodedTile(NamedTuple):
    """The tile of a program of `multiply_few_rows`; its sizes are powers of two."""

    rows: int  # the exact number of rows that it is for
    outputs: int
    units: int
    warps: int


_ANY: Final = 1 << 62
# The fastest tiles on an H200 among those that registers and shared memory hold
# (`testing/compiled_kernels.py`). With more rows than the last, numbers are written for a library.
_NARROW: Final[dict[Generation, tuple[CodeTile, ...]]] = {  # codes of fewer than 8 bits
    "ampere": (CodeTile(16, 64, 16, 128, 4, 3, True), CodeTile(64, 64, 32, 64, 4, 3, True)),
    "hopper": (
        CodeTile(16, 64, 16, 128, 4, 3, True),
        CodeTile(32, 64, 32, 128, 4, 3, True),
        CodeTile(64, 64, 64, 128, 4, 3, True),
    ),
}
_BYTES: Final[dict[Generation, tuple[CodeTile, ...]]] = {  # codes of 8 bits
    "ampere": (CodeTile(16, 64, 16, 64, 4, 3, True), CodeTile(64, 64, 32, 64, 4, 3, True)),
    "hopper": (
        CodeTile(16, 64, 16, 128, 4, 3, True),
        CodeTile(32, 64, 32, 64, 4, 3, True),
        CodeTile(64, 64, 64, 64, 4, 3, True),
        CodeTile(128, 128, 128, 64, 8, 3, True),
    ),
}
# float32 does not use the tensor cores, and takes twice the registers.
_WIDE_TILES: Final = (
    CodeTile(16, 32, 16, 64, 4, 2, True),
    CodeTile(_ANY, 32, 32, 32, 4, 2, False),
)
# By the bits of a code. Two rows of 8-bit codes are faster on the tensor cores.
_FEW: Final[dict[int, tuple[FewCodedTile, ...]]] = {
    2: (FewCodedTile(1, 4, 64, 4),),
    4: (FewCodedTile(1, 8, 128, 4), FewCodedTile(2, 8, 128, 4)),
    **dict.fromkeys((5, 6), (FewCodedTile(1, 4, 64, 2),)),
    8: (FewCodedTile(1, 4, 128, 4),),
}


def choose_tiles(dtype: torch.dtype, generation: Generation, kind: str) -> tuple[CodeTile, ...]:
    """Return the tiles for numbers of a dtype and codes of a kind, by ascending numbers of rows."""
    if dtype.itemsize > 2:
        return _WIDE_TILES
    return (_BYTES if KINDS[kind].bits == 8 else _NARROW)[generation]


def choose_few_tiles(dtype: torch.dtype, kind: str, *, ordered: bool) -> tuple[FewCodedTile, ...]:
    """Return the tiles for few rows; none for float32.

    None for two rows if inputs are `ordered`, since their indices would fill the registers.
    """
    tiles = _FEW[KINDS[kind].bits] if dtype.itemsize == 2 else ()
    return tiles[:1] if ordered else tiles
