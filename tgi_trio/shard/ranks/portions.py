"""Collectives of tensor-parallel ranks, for backends with numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.model.split import Portion
from tgi_trio.shard.ranks.exchange import PLACE, Exchange

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.models.decoder import Ranks

Floats = NDArray[np.float32]
_CPU = torch.device("cpu")


class Portions:
    """A rank's end of a group that computes every layer together, on CPUs."""

    def __init__(self, group: Ranks) -> None:
        """`group`: of those that divide the layers; waits for all of them."""
        self.portion = Portion(group.rank, group.size)
        self._group = group
        self._exchange = Exchange.open(group)

    def add_up(self, parts: Floats) -> None:
        """All-reduce: overwrite `parts` [n] with the sum of all ranks', bit-identical on each."""
        if self._exchange is None:
            self._group.all_reduce(torch.from_numpy(parts))
            return
        for begin in range(0, len(parts), PLACE):
            piece = parts[begin : begin + PLACE]
            self._exchange.show(piece).sum(axis=0, out=piece)

    def gather(self, logits: Floats, vocab_size: int) -> Floats:
        """All-gather: return [S, vocab_size] of the ranks' parts, [S, size by `block_share`]."""
        ranks, width = self.portion.ranks, -(-vocab_size // self.portion.ranks)
        own = np.zeros((len(logits), width), np.float32)
        own[:, : logits.shape[1]] = logits
        if self._exchange is None or width > PLACE:
            return self._group.all_gather(torch.from_numpy(own)).numpy()[:, :vocab_size]
        every = np.empty((len(logits), ranks, width), np.float32)
        step = PLACE // width
        for begin in range(0, len(own), step):
            rows = own[begin : begin + step]
            shown = self._exchange.show(rows.reshape(-1)).reshape(ranks, -1, width)
            every[begin : begin + step] = shown.swapaxes(0, 1)
        return every.reshape(len(own), -1)[:, :vocab_size]

    def least(self, value: int) -> int:
        """Return the minimum of all ranks' `value`s."""
        return self._group.least(value, _CPU)

    def describe(self) -> str:
        """Return a description for the operator."""
        return f"one of {self.portion.ranks} ranks"
