"""Embeddings of tokens that adapters on a device have of their own (`trainable_token_indices`)."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from tgi_trio.shard.adapters.numbers import EmbeddedRows
from tgi_trio.shard.torch_backend.layers.adapted import PackedRows
from tgi_trio.shard.torch_backend.layers.slotted_linear import AdapterTile, SlotMemory

COPIED: Final = 1024  # numbers of a row that a program copies at once


class SlottedEmbeddings:
    """Implements `ChangeEmbedded` for the adapters in the slots of a device.

    A slot has room for as many tokens as the largest rank.
    """

    def __init__(self, memory: SlotMemory, width: int) -> None:
        """`width`: of an embedding."""
        numbers, slots = memory.numbers, len(memory.numbers)
        self._memory = memory
        self._tokens = torch.full((slots, memory.ranks), -1, device=numbers.device)
        self._rows = numbers.new_zeros((slots * memory.ranks, width))  # slot by slot

    @staticmethod
    def count_bytes(tokens: int, width: int, dtype: torch.dtype) -> int:
        """Return the memory for this many tokens in all slots, before it is taken; `width` 0: 0."""
        return 0 if not width else tokens * (torch.int64.itemsize + width * dtype.itemsize)

    @property
    def used(self) -> bool:
        return self._memory.tiles is not None

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        memory = self._memory
        if memory.tiles is not None and memory.tile is not None:
            self._place(token_ids, x, memory.tiles, memory.tile.rows)
        return x

    def pack(self, embedded: EmbeddedRows | None) -> PackedRows:
        """Return an adapter's embeddings as `install` copies them, on the host. Thread-safe."""
        tokens = np.full(self._memory.ranks, -1, np.int64)
        if embedded is None:
            return torch.from_numpy(tokens), torch.empty((0, 0), dtype=self._rows.dtype)
        tokens[: len(embedded.tokens)] = embedded.tokens
        return torch.from_numpy(tokens), torch.from_numpy(embedded.rows).to(self._rows.dtype)

    def install(self, slot: int, packed: PackedRows) -> None:
        """Copy an adapter's embeddings to its slot."""
        tokens, rows = packed
        self._tokens[slot].copy_(tokens, non_blocking=True)
        if len(rows):
            first = slot * self._memory.ranks
            self._rows[first : first + len(rows)].copy_(rows, non_blocking=True)

    def compile(self, tile: AdapterTile) -> None:
        """Compile the kernel for a kind of tiles, by a launch that does nothing."""
        ids = self._tokens.new_zeros(1)
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=ids.device)
        self._place(ids, self._rows.new_zeros((1, self._rows.shape[1])), tiles, tile.rows)

    def _place(self, ids: torch.Tensor, x: torch.Tensor, tiles: torch.Tensor, rows: int) -> None:
        """Write embeddings to `x` [T, width], in place; `tiles` of at most `rows` tokens."""
        from tgi_trio.shard.torch_backend.kernels.adapters import place_embeddings  # Triton

        ranks = self._memory.ranks
        place_embeddings[(len(tiles), rows)](
            *(x, ids, self._tokens, self._rows, tiles, x.shape[1]),
            RANKS=ranks,
            PADDED=1 << (ranks - 1).bit_length(),
            BLOCK=COPIED,
        )
