"""A step's plan on the device: block tables, context lengths and slots of K and V.

Imported only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.torch_backend.attention.paged.tiling import SingleTiling, Tiling
from tgi_trio.shard.torch_backend.kv_cache import KVCache


@dataclass(slots=True)
class PagedBatch:
    """A plan on the device."""

    cache: KVCache
    slots: torch.Tensor  # int64 [T]: where new K and V are written
    tables: torch.Tensor  # int32: rows of `width` block numbers
    width: torch.Tensor  # int32 [1]
    contexts: torch.Tensor  # int32 [R]
    query_starts: torch.Tensor  # int32 [R + 1]
    tiling: Tiling
    decodes: bool  # every row has one token
    lasts: torch.Tensor | None  # int32 [T]: the last position that each query sees; None: its own
    longest: int  # keys that a row may have, at most
    page: int = BLOCK_SIZE  # tokens to which an entry of a table points
    chosen: PagedBatch | None = None  # over the tokens that an index has chosen last
    _token_rows: torch.Tensor | None = None
    _choices: dict[tuple[int, int], Choices] = field(default_factory=dict)
    _counters: dict[int, torch.Tensor] = field(default_factory=dict)

    def token_rows(self) -> torch.Tensor:
        """Return the row of each token, int32 [T]."""
        if self._token_rows is None:
            tokens = torch.arange(len(self.slots), dtype=torch.int32, device=self.slots.device)
            if not self.decodes:
                ends = self.query_starts[1:]
                tokens = torch.searchsorted(ends, tokens, right=True, out_int32=True)
            self._token_rows = tokens
        return self._token_rows

    def counters(self, count: int) -> torch.Tensor:
        """Return int32 [count] that are zero, for kernels one after another that leave them so.

        They are made once, so that those of a recording do not move.
        """
        if count not in self._counters:
            zeros = torch.zeros(count, dtype=torch.int32, device=self.slots.device)
            self._counters[count] = zeros
        return self._counters[count]

    def over(self, slots: torch.Tensor, counts: torch.Tensor) -> PagedBatch:
        """Return a batch whose rows attend to listed tokens, with one query each.

        `slots`: int32 [N, width]; `counts`: int32 [N].
        """
        rows, width = slots.shape
        if (rows, width) not in self._choices:
            self._choices[rows, width] = Choices.of(rows, width, self.slots.device)
        fixed = self._choices[rows, width]
        return PagedBatch(
            self.cache,
            self.slots,
            slots,
            fixed.width,
            counts,
            fixed.query_starts,
            fixed.tiling,
            decodes=True,
            lasts=None,
            longest=width,
            page=1,
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """What all batches over as many lists of tokens share, whatever is listed."""

    width: torch.Tensor  # int32 [1]
    query_starts: torch.Tensor  # int32 [N + 1]
    tiling: Tiling

    @classmethod
    def of(cls, rows: int, width: int, device: torch.device) -> Choices:
        """Return what lists of `width` tokens share, one for each of `rows`."""
        return cls(
            torch.full((1,), width, dtype=torch.int32, device=device),
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            SingleTiling(rows, device),
        )
