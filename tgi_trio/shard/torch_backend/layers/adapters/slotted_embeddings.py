"""What adapters on a device change of embeddings: some rows, or all by A and B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch

from tgi_trio.model.adapters.sites import AdapterScope
from tgi_trio.shard.adapters.numbers import AdapterNumbers
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import AdapterTile, SlotMemory
from tgi_trio.shard.torch_backend.padding import next_power_of_2

COPIED: Final = 1024  # numbers of a row that a program copies at once
ADDED_ROWS: Final = 16  # of a program that adds to embeddings
ADDED_COLUMNS: Final = 64
Packed = Sequence[torch.Tensor]  # an adapter's part, on the host


class ChangeRows(Protocol):
    """One way in which adapters change embeddings, with their slots."""

    nbytes: int

    def pack(self, numbers: AdapterNumbers) -> Packed:
        """Return an adapter's part as `install` copies it, on the host. Thread-safe."""
        ...

    def install(self, slot: int, packed: Packed) -> None:
        """Copy an adapter's part to its slot."""
        ...

    def compile(self, tile: AdapterTile) -> None:
        """Compile the kernel for a kind of tiles, by a launch that does nothing."""
        ...

    def apply(self, ids: torch.Tensor, x: torch.Tensor, tiles: torch.Tensor, rows: int) -> None:
        """Change embeddings `x` [T, width], in place; `tiles` of at most `rows` tokens."""
        ...


class SlottedEmbeddings:
    """Implements `ChangeEmbedded` for the adapters in the slots of a device."""

    def __init__(self, memory: SlotMemory, parts: Sequence[ChangeRows]) -> None:
        self.parts = parts
        self._memory = memory

    @staticmethod
    def count_bytes(
        scope: AdapterScope, slots: int, ranks: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> int:
        """Return the memory that all slots take, before it is taken.

        `ranks`: the largest of any adapter, aligned; `shape`: of the embedding, [tokens, width].
        """
        tokens, width = shape
        numbers = ranks * (width * scope.tokens + (tokens + width) * scope.lookups)
        numbers += width * (scope.lookups and scope.gains)
        others = torch.int64.itemsize * ranks * scope.tokens + torch.int32.itemsize * scope.lookups
        return slots * (numbers * dtype.itemsize + others)

    @property
    def used(self) -> bool:
        return self._memory.tiles is not None

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        memory = self._memory
        if memory.tiles is not None and memory.tile is not None:
            for part in self.parts:
                part.apply(token_ids, x, memory.tiles, memory.tile.rows)
        return x


class SlottedRows:
    """Rows in place of the model's. A slot has room for as many as the largest rank."""

    def __init__(self, memory: SlotMemory, width: int) -> None:
        """`width`: of an embedding."""
        numbers, slots = memory.numbers, len(memory.numbers)
        self._memory = memory
        self._tokens = torch.full((slots, memory.ranks), -1, device=numbers.device)
        self._rows = numbers.new_zeros((slots * memory.ranks, width))  # slot by slot
        self.nbytes = self._tokens.nbytes + self._rows.nbytes

    def pack(self, numbers: AdapterNumbers) -> Packed:
        embedded = numbers.embedded
        tokens = np.full(self._memory.ranks, -1, np.int64)
        if embedded is None:
            return torch.from_numpy(tokens), torch.empty((0, 0), dtype=self._rows.dtype)
        tokens[: len(embedded.tokens)] = embedded.tokens
        return torch.from_numpy(tokens), torch.from_numpy(embedded.rows).to(self._rows.dtype)

    def install(self, slot: int, packed: Packed) -> None:
        tokens, rows = packed
        self._tokens[slot].copy_(tokens, non_blocking=True)
        if len(rows):
            first = slot * self._memory.ranks
            self._rows[first : first + len(rows)].copy_(rows, non_blocking=True)

    def compile(self, tile: AdapterTile) -> None:
        ids = self._tokens.new_zeros(1)
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=ids.device)
        self.apply(ids, self._rows.new_zeros((1, self._rows.shape[1])), tiles, tile.rows)

    def apply(self, ids: torch.Tensor, x: torch.Tensor, tiles: torch.Tensor, rows: int) -> None:
        from tgi_trio.shard.torch_backend.kernels.adapters.linear_adapters import (
            place_embeddings,  # Triton
        )

        ranks = self._memory.ranks
        place_embeddings[(len(tiles), rows)](
            *(x, ids, self._tokens, self._rows, tiles, x.shape[1]),
            RANKS=ranks,
            PADDED=next_power_of_2(ranks),
            BLOCK=COPIED,
        )


class SlottedLookups:
    """What is added to all embeddings, B times a token's row of A, and gains times them."""

    def __init__(self, memory: SlotMemory, tokens: int, width: int, *, gains: bool) -> None:
        """`tokens`, `width`: of the embedding; `gains`: whether adapters may have such."""
        numbers, slots = memory.numbers, len(memory.numbers)
        self._a = numbers.new_zeros((slots, tokens, memory.ranks))
        self._b = numbers.new_zeros((slots, width, memory.ranks))
        self._ranks = torch.zeros(slots, dtype=torch.int32, device=numbers.device)
        self._gains = numbers.new_zeros((slots, width)) if gains else None
        self.nbytes = self._a.nbytes + self._b.nbytes + self._ranks.nbytes
        self.nbytes += 0 if self._gains is None else self._gains.nbytes

    def pack(self, numbers: AdapterNumbers) -> Packed:
        pair, most = numbers.looked_up, self._a.shape[2]
        if pair is None:
            return [torch.zeros(1, dtype=torch.int32)]
        rank = pair.a.shape[1]
        both = [torch.from_numpy(each).to(self._a.dtype) for each in (pair.a, pair.b)]
        padded = [torch.nn.functional.pad(each, (0, most - rank)) for each in both]
        if self._gains is not None:
            own = np.zeros(self._gains.shape[1], np.float32) if pair.gains is None else pair.gains
            padded.append(torch.from_numpy(own).to(self._gains.dtype))
        return [torch.full((1,), rank, dtype=torch.int32), *padded]

    def install(self, slot: int, packed: Packed) -> None:
        rank, *parts = packed
        self._ranks[slot : slot + 1].copy_(rank, non_blocking=True)
        memory = [self._a, self._b, *([] if self._gains is None else [self._gains])]
        for own, part in zip(memory, parts, strict=False):  # there may be none
            own[slot].copy_(part, non_blocking=True)

    def compile(self, tile: AdapterTile) -> None:
        device = self._a.device
        tiles = torch.zeros((1, 3), dtype=torch.int32, device=device)
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        self.apply(ids, self._a.new_zeros((1, self._b.shape[1])), tiles, tile.rows)

    def apply(self, ids: torch.Tensor, x: torch.Tensor, tiles: torch.Tensor, rows: int) -> None:
        from tgi_trio.shard.torch_backend.kernels.adapters.linear_adapters import (
            add_embeddings,  # Triton
        )

        tokens, ranks, width = self._a.shape[1], self._a.shape[2], x.shape[1]
        grid = (len(tiles), -(-rows // ADDED_ROWS), -(-width // ADDED_COLUMNS))
        add_embeddings[grid](
            *(x, ids, self._a, self._b, self._a if self._gains is None else self._gains),
            *(self._ranks, tiles, tokens, width),
            GAINS=self._gains is not None,
            RANKS=ranks,
            PADDED=next_power_of_2(ranks),
            ROWS=ADDED_ROWS,
            COLUMNS=ADDED_COLUMNS,
        )


def change_embeddings(
    scope: AdapterScope, memory: SlotMemory, shape: tuple[int, int]
) -> SlottedEmbeddings | None:
    """Return what adapters change of embeddings, None: nothing; `shape`: [tokens, width]."""
    tokens, width = shape
    parts: list[ChangeRows] = []
    if scope.tokens:
        parts.append(SlottedRows(memory, width))
    if scope.lookups:
        parts.append(SlottedLookups(memory, tokens, width, gains=scope.gains))
    return SlottedEmbeddings(memory, parts) if parts else None
