"""The tiles that a step's (query, head) pairs are cut into, found by the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.attention.tiling_kernel import list_tiles
from tgi_trio.shard.torch_backend.staging import Staging

_MOST_LISTED: Final = 32  # tiles of a program
_LEAST_ROWS: Final = 64  # that a kernel is made for
_BESIDE: Final = 4096  # pairs of a tile and a row that it looks at


class Tiles(NamedTuple):
    """Of every tile, int32 [tiles] each."""

    rows: torch.Tensor
    starts: torch.Tensor  # first (query, head) pair, counted from the row's first


class Share(NamedTuple):
    """Rows by how many (query, head) pairs of a KV head they have."""

    above: int = 0  # more than these
    upto: int = 0  # no more than these; 0: any

    def of(self, pairs: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return rows' pairs, 0 for those of the others."""
        mine = pairs > self.above
        if self.upto:
            mine &= pairs <= self.upto
        return pairs * mine


EVERY: Final = Share()


class Tiling(Protocol):
    """Cuts the rows of a step into tiles."""

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """Return tiles of `lanes` pairs of `group` heads of some rows; made once for each kind."""
        ...


@dataclass(slots=True)
class HostTiling:
    """Tiles of rows that the host knows: as many as there are."""

    counts: NDArray[np.int32]  # [R] queries of each row
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
            return Tiles(*map(torch.from_numpy, found))  # nothing that anybody launches
        uploaded = self.staging.upload(found)
        # Each kind keeps its own: what is uploaded next takes their place.
        return Tiles(uploaded[0].clone(), uploaded[1].clone())


@dataclass(slots=True)
class DeviceTiling:
    """Tiles of rows that change with every replay of a recording: as many as there may be."""

    query_starts: torch.Tensor  # int32 [R + 1]
    tokens: int
    _made: dict[tuple[int, int, Share], Tiles] = field(default_factory=dict)

    def tiles(self, lanes: int, group: int, share: Share = EVERY) -> Tiles:
        """See `Tiling`; one tile at least."""
        kind = (lanes, group, share)
        if kind not in self._made:
            self._made[kind] = self._list(*kind)
        return self._made[kind]

    def _list(self, lanes: int, group: int, share: Share) -> Tiles:
        rows = len(self.query_starts) - 1
        count = count_tiles(self.tokens, rows, lanes, group, share)
        found = self.query_starts.new_empty(count)  # memory of their own is aligned
        tiles = Tiles(found, torch.empty_like(found))
        padded = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
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
        # `attend_tile` reads tiles before it waits for the kernel before it: that is to be one
        # which is launched as others are, behind which all that was listed is seen.
        found.new_zeros(1)
        return tiles


def count_listed(rows: int) -> int:
    """Return how many tiles a program lists beside so many rows, both powers of two."""
    return max(1, min(_MOST_LISTED, _BESIDE // rows))


def count_tiles(tokens: int, rows: int, lanes: int, group: int, share: Share) -> int:
    """Return how many tiles some rows may have of so many tokens of so many rows, at least one.

    Each row has one in part.
    """
    pairs = tokens * group
    parts = min(rows, tokens, pairs // (share.above + 1))
    whole = 0 if 0 < share.upto <= lanes else pairs // lanes
    return max(1, whole + parts)


def split_pairs(
    pairs: NDArray[np.int32], lanes: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return int32 (row, first pair within the row) of tiles of at most `lanes` pairs.

    The tiles that see the most keys come first: what begins last should not take longest.
    """
    tiles = -(-pairs // lanes)
    rows = np.repeat(np.arange(len(pairs), dtype=np.int32), tiles)
    first = np.cumsum(tiles) - tiles
    starts = (np.arange(len(rows)) - np.repeat(first, tiles)) * lanes
    order = np.argsort(-starts, kind="stable")
    return rows[order], starts[order].astype(np.int32)
