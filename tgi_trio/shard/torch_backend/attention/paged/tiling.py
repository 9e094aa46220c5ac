"""Cutting a step's (query, head) pairs into tiles, on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.attention.paged.tiling_kernel import list_tiles
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.staging import Staging

_MOST_LISTED: Final = 32  # tiles that a program lists
_LEAST_ROWS: Final = 64  # that the kernel is compiled for
_BESIDE: Final = 4096  # (tile, row) pairs that a program compares


class Tiles(NamedTuple):
    """The row and the first pair of each tile, int32 [tiles] each."""

    rows: torch.Tensor
    starts: torch.Tensor  # first (query, head) pair, counted within the row


class Share(NamedTuple):
    """Which rows are meant, by their number of (query, head) pairs for a KV head."""

    above: int = 0  # rows with more
    upto: int = 0  # rows with no more; 0: no limit

    def of(self, pairs: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows' pairs, with 0 for rows that are not meant."""
        mine = pairs > self.above
        if self.upto:
            mine &= pairs <= self.upto
        return pairs * mine


EVERY: Final = Share()


class Tiling(Protocol):
    """Cuts the rows of a step into tiles."""

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """Return tiles of `lanes` pairs, with `group` heads to a KV head; computed once a kind."""
        ...


@dataclass(slots=True)
class HostTiling:
    """Tiles computed by the host, for a step that is launched: as many as there are."""

    counts: NDArray[np.int32]  # [R]: queries of each row
    staging: Staging
    _made: dict[tuple[int, int, Share], Tiles] = field(default_factory=dict)

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """See `Tiling`."""
        kind = (lanes, group, share)
        if kind not in self._made:
            self._made[kind] = self._cut(*kind)
        return self._made[kind]

    def _cut(self, lanes: int, group: int, share: Share) -> Tiles:
        found = split_pairs(share.of(self.counts * group), lanes)
        if not len(found[0]):
            return Tiles(*map(torch.from_numpy, found))  # for which nothing is launched
        uploaded = self.staging.upload(found)
        # Copies, because the next upload overwrites the staging memory.
        return Tiles(uploaded[0].clone(), uploaded[1].clone())


@dataclass(slots=True)
class DeviceTiling:
    """Tiles computed by each replay of a recording, on the device: as many as there may be."""

    query_starts: torch.Tensor  # int32 [R + 1]
    tokens: int
    _made: dict[tuple[int, int, Share], Tiles] = field(default_factory=dict)

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """See `Tiling`; at least one tile."""
        kind = (lanes, group, share)
        if kind not in self._made:
            self._made[kind] = self._list(*kind)
        return self._made[kind]

    def _list(self, lanes: int, group: int, share: Share) -> Tiles:
        rows = len(self.query_starts) - 1
        count = count_tiles(self.tokens, rows, lanes, group, share)
        found = self.query_starts.new_empty(count)  # two allocations, so that both are aligned
        tiles = Tiles(found, torch.empty_like(found))
        padded = max(_LEAST_ROWS, next_power_of_2(rows))
        block = count_listed(padded)
        list_tiles[(-(-count // block),)](
            tiles.rows,
            tiles.starts,
            self.query_starts,
            rows,
            count,
            GROUP=group,
            LANES=lanes,
            ABOVE=share.above,
            UPTO=share.upto,
            ROWS=padded,
            BLOCK=block,
        )
        # `attend_tile` reads tiles before it waits for the preceding kernel. That must be a kernel
        # without programmatic dependent launch, after which everything listed is visible.
        found.new_zeros(1)
        return tiles


@dataclass(slots=True)
class SingleTiling:
    """Tiles of rows of one query each, which no step changes."""

    rows: int
    device: torch.device
    _made: dict[tuple[int, int], Tiles] = field(default_factory=dict)

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """See `Tiling`. All rows are alike, so a share has all of them or none."""
        if not share.of(np.array([group], np.int32)).any():
            none = torch.empty(0, dtype=torch.int32, device=self.device)
            return Tiles(none, none)
        if (lanes, group) not in self._made:
            each = -(-group // lanes)
            tile = torch.arange(self.rows * each, dtype=torch.int32, device=self.device)
            self._made[lanes, group] = Tiles(tile // each, tile % each * lanes)
        return self._made[lanes, group]


def count_listed(rows: int) -> int:
    """Return how many tiles a program lists, for so many rows; both are powers of two."""
    return max(1, min(_MOST_LISTED, _BESIDE // rows))


def count_tiles(tokens: int, rows: int, lanes: int, group: int, share: Share) -> int:
    """Return the most tiles that so many tokens in so many rows can have, at least one.

    Each row may have one partial tile.
    """
    pairs = tokens * group
    parts = min(rows, tokens, pairs // (share.above + 1))
    whole = 0 if 0 < share.upto <= lanes else pairs // lanes
    return max(1, whole + parts)


def split_pairs(
    pairs: NDArray[np.int32], lanes: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return int32 (row, first pair within the row) of tiles of at most `lanes` pairs.

    Tiles with the most keys come first, so that what begins last does not take longest.
    """
    tiles = -(-pairs // lanes)
    rows = np.repeat(np.arange(len(pairs), dtype=np.int32), tiles)
    first = np.cumsum(tiles) - tiles
    starts = (np.arange(len(rows)) - np.repeat(first, tiles)) * lanes
    order = np.argsort(-starts, kind="stable")
    return rows[order], starts[order].astype(np.int32)
