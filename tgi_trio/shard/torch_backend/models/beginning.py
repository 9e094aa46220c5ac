"""Looks up a few tokens' embeddings, cosines and sines in a single launch on a device.

Separately these are three lookups, each a launch. The warm-up measures for which numbers of tokens
the single launch is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.linears.few_rows import FEW, Seconds
from tgi_trio.shard.torch_backend.layers.residual import count_warps
from tgi_trio.shard.torch_backend.models.attending import RotaryTables
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap

_WORTH: Final = 0.97  # a single launch must take less than this part of the time of three

Begun = tuple[torch.Tensor, RotaryTables]  # the first layer's input [T, hidden], and rotations
# From token ids, positions and lengths, as for `Decoder.forward`.
Begin = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Begun]


class Beginning:
    """Looks up embeddings and rotations of a decoder whose whole vocabulary is on one device."""

    def __init__(self, embedding: torch.Tensor, scale: float, rotaries: Sequence[Rotary]) -> None:
        """`embedding`: [tokens, hidden]; `scale`: multiplies what is looked up there.

        `rotaries`: empty if the model does more with a token than to look it up, so that this
        cannot be used.
        """
        self._embedding = embedding
        self._scale = float(torch.tensor(scale, dtype=embedding.dtype))  # as the model was trained
        self._rotaries = rotaries
        self.rows: frozenset[int] = frozenset()  # numbers of tokens for which this is used

    def serves(self, positions: torch.Tensor) -> bool:
        """Return whether tokens at these positions are to be looked up here."""
        return positions.dim() == 1 and len(positions) in self.rows

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, _: torch.Tensor | None = None
    ) -> Begun:
        """Return what `Decoder.begin` does; `positions` int64 [T].

        Raises RuntimeError if there are no tables of all positions.
        """
        from tgi_trio.shard.torch_backend.kernels.beginning import begin_rows  # imports Triton

        kept = self._kept()
        if kept is None:
            raise RuntimeError("there is no table to look up what turns positions")
        count, (rows, size) = len(token_ids), self._embedding.shape
        rotary = kept.cos.shape[-1]
        x = self._embedding.new_empty((count, size))
        table = RotaryTable(*(kept.cos.new_empty((count, 1, rotary)) for _ in range(2)))
        padded = next_power_of_2(size)
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
        """Choose the numbers of tokens for which a single launch takes less time than `apart`."""
        self.rows = frozenset()
        kept = self._kept()
        if kept is None:
            return
        for rows in FEW:
            ids = torch.arange(rows[-1], device=self._embedding.device) % len(self._embedding)
            places = ids % len(kept.cos)
            inputs = (ids, places, places + 1)
            took = seconds(partial(_embed, apart, inputs))
            less = seconds(partial(_embed, self, inputs)) < _WORTH * took
            if less and agree(self(*inputs), apart(*inputs)):
                self.rows |= set(rows)

    def _kept(self) -> RotaryTable | None:
        """Return the tables of all positions, None if the kernel cannot look them up."""
        if len(self._rotaries) != 1:
            return None
        kept = self._rotaries[0].kept
        if kept is None or kept.cos.shape[-1] == 0:
            return None
        if kept.query_scale is not None or kept.logs is not None:
            return None
        return kept if kept.cos.dtype == self._embedding.dtype else None


def _embed(begin: Begin, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the first layer's input."""
    return begin(*inputs)[0]


def agree(found: Begun, wanted: Begun) -> bool:
    """Return whether both are equal, and print if not: devices we have not tried may be wrong."""
    pairs = [(found[0], wanted[0]), *zip(found[1][0][:2], wanted[1][0][:2], strict=True)]
    if all(torch.equal(ours, theirs) for ours, theirs in pairs):
        return True
    message = "few tokens are looked up in launches apart: one launch found other numbers"
    print(message, file=sys.stderr, flush=True)
    return False
