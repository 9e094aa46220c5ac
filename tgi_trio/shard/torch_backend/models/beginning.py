"""What a decoder's first layer gets of few tokens, and what turns them, in one launch on a device.

Apart these are three look-ups, each a launch. Which numbers of tokens have one is measured at the
warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.layers.few_rows import CLASSES, Seconds
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.layers.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.models.attending import RotaryTables
from tgi_trio.shard.torch_backend.torch_device import overlap

_WORTH: Final = 0.97  # of what the launches apart take, from which on there is one

Begun = tuple[torch.Tensor, RotaryTables]  # what the first layer gets, [T, hidden], and what turns
# Of token ids, positions and lengths, as `Decoder.forward` has them.
Begin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Begun]


class Beginning:
    """Looks up embeddings and cosines of a decoder on one device, which has all of its tokens."""

    def __init__(self, embedding: torch.Tensor, scale: float, rotaries: Sequence[Rotary]) -> None:
        """`embedding` [tokens, hidden]; `scale`: what is looked up there is multiplied by.

        `rotaries`: none where more is done of a token than to look it up; nothing begins so then.
        """
        self._embedding = embedding
        self._scale = float(torch.tensor(scale, dtype=embedding.dtype))  # as the model was trained
        self._rotaries = rotaries
        self.rows: frozenset[int] = frozenset()  # numbers of tokens that begin so

    def serves(self, positions: torch.Tensor) -> bool:
        """Return whether tokens of these positions are to be looked up here."""
        return positions.dim() == 1 and len(positions) in self.rows

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, _: torch.Tensor | None = None
    ) -> Begun:
        """Return what `Decoder.begin` does; `positions` int64 [T].

        Raises RuntimeError where no tables are kept.
        """
        from tgi_trio.shard.torch_backend.kernels.beginning import begin_rows  # imports Triton

        kept = self._kept()
        if kept is None:
            raise RuntimeError("there is no table to look up what turns positions")
        count, (rows, size) = len(token_ids), self._embedding.shape
        rotary = kept.cos.shape[-1]
        x = self._embedding.new_empty((count, size))
        table = RotaryTable(*(kept.cos.new_empty((count, 1, rotary)) for _ in range(2)))
        padded = 1 << (size - 1).bit_length()
        begin_rows[(count,)](
            *(x, table.cos, table.sin),
            *(token_ids, positions, self._embedding, kept.cos, kept.sin),
            self._scale,
            rows,
            SIZE=size,
            PADDED=padded,
            ROTARY=rotary,
            PADDED_ROTARY=pad_dim(rotary),
            SCALES=self._scale != 1.0,
            **overlap(x.device),
            num_warps=count_warps(padded),
        )
        return x, {0: table}

    def choose(self, apart: Begin, seconds: Seconds) -> None:
        """Have few tokens looked up in one launch where that takes less than `apart`."""
        self.rows = frozenset()
        kept = self._kept()
        if kept is None:
            return
        for rows in CLASSES:
            ids = torch.arange(rows[-1], device=self._embedding.device) % len(self._embedding)
            places = ids % len(kept.cos)
            given = (ids, places, places + 1)
            took = seconds(partial(_embed, apart, given))
            less = seconds(partial(_embed, self, given)) < _WORTH * took
            if less and agree(self(*given), apart(*given)):
                self.rows |= set(rows)

    def _kept(self) -> RotaryTable | None:
        """Return the tables of all positions where they are looked up as embeddings are."""
        if len(self._rotaries) != 1:
            return None
        kept = self._rotaries[0].kept
        if kept is None or kept.query_scale is not None or kept.cos.shape[-1] == 0:
            return None
        return kept if kept.cos.dtype == self._embedding.dtype else None


def _embed(begin: Begin, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Begin, and return what the first layer gets."""
    return begin(*given)[0]


def agree(found: Begun, wanted: Begun) -> bool:
    """Return whether all is the same; that a device that nobody has tried is wrong is told."""
    pairs = [(found[0], wanted[0]), *zip(found[1][0][:2], wanted[1][0][:2], strict=True)]
    if all(torch.equal(ours, theirs) for ours, theirs in pairs):
        return True
    told = "few tokens are looked up in launches apart: one launch found other numbers"
    print(told, file=sys.stderr, flush=True)
    return False
