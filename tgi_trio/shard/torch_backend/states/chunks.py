"""Rows of unequal length cut into chunks.

The first chunks of all rows are computed together, then the second ones of those that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.staging import Array


class Turn(NamedTuple):
    """A chunk of each of the first n of the longer rows."""

    places: torch.Tensor  # int64 [n, L] of tokens in the flat list
    there: torch.Tensor  # bool [n, L] which are tokens; others are the row's last token again
    own: torch.Tensor  # int64 [N] the entries of the chunk, flat, that are kept
    targets: torch.Tensor  # int64 [N] and where: the places of tokens


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Where the tokens of longer rows lie; rows of one token are apart. All on the device."""

    rows: torch.Tensor  # int64 [N] of more than one token, the longest first
    turns: list[Turn]
    lone_rows: torch.Tensor  # int64 of one token
    lone_places: torch.Tensor  # where these are
    lone_targets: torch.Tensor  # and where what is found goes: the same, for tokens

    @classmethod
    def of(cls, here: Sequence[torch.Tensor]) -> Chunks:
        """Return what `cut_rows` or `cut_into` has listed."""
        turns = [Turn(*here[i : i + 4]) for i in range(4, len(here), 4)]
        return cls(here[0], turns, *here[1:4])


class Room(NamedTuple):
    """What a recording has room for."""

    tokens: int
    rows: int  # of which the last is never a step's
    longer: int  # of more than one token


def cut_rows(starts: Sequence[int], size: int) -> list[Array]:
    """Return the chunks of at most `size` tokens of rows that start at `starts`, cumulative."""
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
    """Return what `cut_rows` does, of the same sizes whatever the rows are, which `room` holds.

    Rows that are missing are the last one's, and what is found of tokens that are none goes behind
    all tokens.
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
        # As many rows as may be so long: the longest come first.
        n = min(room.longer, max(1, room.tokens // max(2, done + 1)))
        places = begin[:n, None] + done + np.arange(size)
        there = places < end[:n, None]
        targets = np.where(there, places, room.tokens).reshape(-1)
        # A row reads no other's tokens: its state is what it is, times nothing, whatever these are.
        own = np.minimum(places, np.maximum(end[:n, None] - 1, 0))
        arrays += [own, there, np.arange(n * size), targets]
    return arrays


def _sort_rows(starts: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """Return starts and lengths of rows, which are longer than one token, and which are not."""
    first = np.asarray(starts, np.int64)
    lengths = np.diff(first)
    rows = np.argsort(-lengths, kind="stable")
    return first, lengths, rows[lengths[rows] > 1], np.flatnonzero(lengths == 1)


def _filled(values: NDArray[np.int64], size: int, rest: int) -> NDArray[np.int64]:
    """Return `size` numbers, `values` first."""
    found = np.full(size, rest, np.int64)
    found[: len(values)] = values
    return found
