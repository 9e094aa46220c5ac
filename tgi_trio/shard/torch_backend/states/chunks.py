"""Cuts a step's rows of unequal length into chunks, for scans.

By torch's operations the first chunks of all rows are computed together, then the second ones of
rows that have them, and so on. Kernels are told of all chunks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.staging import Array


class ChunkTurn(NamedTuple):
    """A chunk of L entries from each of the first n of the longer rows."""

    places: torch.Tensor  # int64 [n, L], of tokens in the flat list
    there: torch.Tensor  # bool [n, L], which are tokens; padding is the row's last token again
    own: torch.Tensor  # int64 [N], flat indices of the entries whose outputs are kept
    targets: torch.Tensor  # int64 [N], where these go in the flat list


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A step's rows: longer ones as chunks, and those of one token. All on the device."""

    rows: torch.Tensor  # int64 [N], of more than one token, the longest first
    turns: list[ChunkTurn]
    lone_rows: torch.Tensor  # int64, of one token
    lone_places: torch.Tensor  # their tokens in the flat list
    lone_targets: torch.Tensor  # where their outputs go: the same, except for padding

    @classmethod
    def of(cls, here: Sequence[torch.Tensor]) -> Chunks:
        """Return the chunks from the arrays of `cut_rows` or `cut_into`, on the device."""
        turns = [ChunkTurn(*here[i : i + 4]) for i in range(4, len(here), 4)]
        return cls(here[0], turns, *here[1:4])


class Pieces(NamedTuple):
    """What kernels are told of a step's rows and their chunks. All int64, on the device.

    Padding chunks have no tokens; padding rows are the last one of a recording, which has none.
    """

    rows: torch.Tensor  # [N], of other than one token, the longest first
    lone: torch.Tensor  # [M], of one token
    begins: torch.Tensor  # [chunks], the first token of each chunk of `rows` in the flat list
    ends: torch.Tensor  # likewise, exclusive


class Room(NamedTuple):
    """What a recording has room for."""

    tokens: int
    rows: int  # the last one is never a step's
    longer: int  # rows of more than one token


def cut_rows(starts: Sequence[int], size: int) -> list[Array]:
    """Return `Chunks` as arrays, of at most `size` tokens; `starts` [R + 1]: rows, cumulative."""
    first, lengths, rows, lone = _sort_rows(starts)
    size = min(size, int(lengths.max()))
    begin, end = first[rows, None], first[rows + 1, None]
    arrays: list[Array] = [rows, lone, first[lone], first[lone]]
    for done in range(0, int(lengths.max()), size):
        n = int((lengths[rows] > done).sum())
        if not n:
            break
        places = begin[:n] + done + np.arange(size)
        there = places < end[:n]
        places = np.minimum(places, end[:n] - 1)
        arrays += [places, there, np.flatnonzero(there), places[there]]
    return arrays


def cut_into(starts: Sequence[int], size: int, room: Room) -> list[Array]:
    """Return what `cut_rows` does, padded to sizes that depend on `room` alone.

    Padding rows are the last row of `room`, and outputs of padding go after all tokens.
    """
    first, _, rows, lone = _sort_rows(starts)
    size = min(size, room.tokens)
    begin, end = _filled(first[rows], room.longer, 0), _filled(first[rows + 1], room.longer, 0)
    arrays: list[Array] = [
        _filled(rows, room.longer, room.rows - 1),
        _filled(lone, room.rows, room.rows - 1),
        _filled(first[lone], room.rows, 0),
        _filled(first[lone], room.rows, room.tokens),
    ]
    for done in range(0, room.tokens, size):
        # The most rows that can have more than `done` tokens; the longest come first.
        n = min(room.longer, max(1, room.tokens // max(2, done + 1)))
        places = begin[:n, None] + done + np.arange(size)
        there = places < end[:n, None]
        targets = np.where(there, places, room.tokens).reshape(-1)
        # A row's padding repeats a token of its own: multiplied by zero, another row's NaN would
        # still be NaN.
        own = np.minimum(places, np.maximum(end[:n, None] - 1, 0))
        arrays += [own, there, np.arange(n * size), targets]
    return arrays


def cut_evenly(starts: Sequence[int], size: int, room: Room | None) -> list[Array]:
    """Return `Pieces` as arrays, of chunks of at most `size` tokens."""
    first = np.asarray(starts, np.int64)
    lengths = np.diff(first)
    rows = np.argsort(-lengths, kind="stable")
    rows, lone = rows[lengths[rows] != 1], np.flatnonzero(lengths == 1)
    counts = -(-lengths[rows] // size)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(first[rows], counts) + places * size
    ends = np.minimum(begins + size, np.repeat(first[rows + 1], counts))
    if room is None:
        return [rows, lone, begins, ends]
    most = room.tokens // size + min(room.rows, max(1, room.tokens // 2))
    return [
        _filled(rows, room.rows, room.rows - 1),
        _filled(lone, room.rows, room.rows - 1),
        _filled(begins, most, 0),
        _filled(ends, most, 0),
    ]


def _sort_rows(starts: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """Return starts, lengths, rows of more than one token (the longest first), rows of one."""
    first = np.asarray(starts, np.int64)
    lengths = np.diff(first)
    rows = np.argsort(-lengths, kind="stable")
    return first, lengths, rows[lengths[rows] > 1], np.flatnonzero(lengths == 1)


def _filled(values: NDArray[np.int64], size: int, rest: int) -> NDArray[np.int64]:
    """Return `size` numbers: `values`, padded with `rest`."""
    found = np.full(size, rest, np.int64)
    found[: len(values)] = values
    return found
