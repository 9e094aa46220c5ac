"""EXL3's matrices of any rings, made on the device: random bits are random weights."""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.model.quantised.exl3_layout import TILE, TURNED
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import Trellis, TrellisForm

EXL3: Final = "exl3"
_HALF_BITS: Final = 6  # of a weight: 3 bits, for what such files are made
_SPREAD: Final = 1.24  # of a codebook's numbers, whose turns keep it
BYTES: Final = _HALF_BITS / 16  # of a weight; scales are less than a hundredth


def make_trellis(inputs: int, outputs: int, device: torch.device) -> Trellis:
    """Return a matrix that keeps the size of what passes."""
    form = TrellisForm("mcg", _HALF_BITS, inputs)
    blocks, tiles = -(-outputs // TURNED), form.padded // TILE
    words = (blocks, tiles, TURNED // TILE, 4 * _HALF_BITS)
    least, most = -(1 << 31), 1 << 31
    return Trellis(
        form,
        outputs,
        torch.randint(least, most, words, dtype=torch.int32, device=device),
        torch.ones((1, form.padded), dtype=torch.float16, device=device),
        torch.zeros(blocks, dtype=torch.int32, device=device),
        torch.full((blocks * TURNED,), inputs**-0.5 / _SPREAD, dtype=torch.float16, device=device),
        (outputs,),
    )
