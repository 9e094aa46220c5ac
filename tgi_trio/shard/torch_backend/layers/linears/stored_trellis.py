"""EXL3's matrices in the layout that kernels read.

    y = output scales * H (numbers (H (input scales * x))) / 128, H Hadamard's matrix of 128

A *block* is 128 outputs, which are turned together. Of a block come the rings of the first 16
inputs, those of the next, and so on, so that a program reads one piece of memory. A ring has the
words of the file, half bits and all. Matrices one below the other may scale their inputs in several
*sorts* of ways, and each block has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from tgi_trio.model.quantised.exl3_layout import TILE, TURNED
from tgi_trio.shard.checkpoint.formats.exl3 import Rings

_TILES = TURNED // TILE  # of a block, side by side or one below the other


class TrellisForm(NamedTuple):
    """What matrices must have in common to be multiplied in one launch."""

    book: str  # of `checkpoint/formats/exl3.py`
    half_bits: int  # of a weight
    inputs: int

    @property
    def padded(self) -> int:
        """Return the inputs that are stored."""
        return -(-self.inputs // TURNED) * TURNED


@dataclass(frozen=True, slots=True)
class Trellis:
    """A matrix [outputs, inputs]."""

    form: TrellisForm
    outputs: int
    rings: torch.Tensor  # int32 [blocks, padded / 16, 8, 4 * half bits]
    input_scales: torch.Tensor  # float16 [sorts, padded]
    sorts: torch.Tensor  # int32 [blocks]
    output_scales: torch.Tensor  # float16 [blocks * 128]
    counts: tuple[int, ...]  # outputs of each sort, one below the other

    def to(self, device: torch.device) -> Trellis:
        names = ("rings", "input_scales", "sorts", "output_scales")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def nbytes(self) -> int:
        tensors = (self.rings, self.input_scales, self.sorts, self.output_scales)
        return sum(tensor.nbytes for tensor in tensors)


def encode_rings(rings: Rings, shape: tuple[int, int]) -> Trellis:
    """Return a matrix of `shape` [outputs, inputs] in the kernels' layout, on the host."""
    outputs, inputs = shape
    across, down, words = rings.words.shape
    # Exactly what the file has, in another order.
    blocks = rings.words.reshape(across, down // _TILES, _TILES, words).swapaxes(0, 1)
    return Trellis(
        TrellisForm(rings.book.name, rings.half_bits, inputs),
        outputs,
        torch.from_numpy(blocks.copy().view(np.int32)),
        torch.from_numpy(rings.input_scales[None]),
        torch.zeros(down // _TILES, dtype=torch.int32),
        torch.from_numpy(rings.output_scales),
        (outputs,),
    )


def join_trellises(parts: Sequence[Trellis]) -> list[Trellis]:
    """Return matrices, with neighbours that one launch can multiply joined into one."""
    joined: list[Trellis] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.form == part.form and last.outputs % TURNED == 0:
            joined[-1] = join_below(last, part)
        else:
            joined.append(part)
    return joined


def join_below(one: Trellis, other: Trellis) -> Trellis:
    """Return a matrix below the blocks of another; inputs that are scaled alike are of one sort."""
    scales, counts, begin = one.input_scales, list(one.counts), len(one.counts)
    others = other.input_scales
    if torch.equal(scales[-1], others[0]):
        others, begin = others[1:], begin - 1
        counts[-1] += other.counts[0]
        counts += other.counts[1:]
    else:
        counts += other.counts
    return Trellis(
        one.form,
        one.outputs + other.outputs,
        torch.cat((one.rings, other.rings)),
        torch.cat((scales, others)),
        torch.cat((one.sorts, other.sorts + begin)),
        torch.cat((one.output_scales, other.output_scales)),
        tuple(counts),
    )


def stack_trellises(every: Sequence[Trellis]) -> Trellis | None:
    """Return the tensors of several matrices one below the other; None if the matrices differ.

    The rest says what each of them is: `sorts` are numbers within a matrix.
    """
    first = every[0]
    if any((o.form, o.counts) != (first.form, first.counts) for o in every):
        return None
    return replace(
        first,
        rings=torch.cat([each.rings for each in every]),
        input_scales=torch.cat([each.input_scales for each in every]),
        sorts=torch.cat([each.sorts for each in every]),
        output_scales=torch.cat([each.output_scales for each in every]),
    )
