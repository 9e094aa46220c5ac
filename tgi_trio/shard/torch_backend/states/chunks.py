"""Rows of unequal length cut into chunks.

The first chunks of all rows are computed together, then the second ones of those that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tgi_trio.shard.torch_backend.staging import Array, Send


class Turn(NamedTuple):
    """A chunk of each of the first n of the longer rows."""

    places: torch.Tensor  # int64 [n, L] of tokens in the flat list
    there: torch.Tensor  # bool [n, L] which are tokens; others are the row's last token again
    own: torch.Tensor  # int64 [N] the entries of the chunk, flat, that are tokens
    targets: torch.Tensor  # int64 [N] and the places of these


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Where the tokens of longer rows lie; rows of one token are apart. All on the device."""

    rows: torch.Tensor  # int64 [N] of more than one token, the longest first
    turns: list[Turn]
    lone_rows: torch.Tensor  # int64 of one token
    lone_places: torch.Tensor  # and where these are


def cut_rows(starts: Sequence[int], size: int, send: Send) -> Chunks:
    """Return the chunks of at most `size` tokens of rows that start at `starts`, cumulative.

    They go up in one copy, by `send`.
    """
    first = np.asarray(starts, np.int64)
    lengths = np.diff(first)
    rows = np.argsort(-lengths, kind="stable")
    rows = rows[lengths[rows] > 1]
    size = min(size, int(lengths.max()))
    begin, end = first[rows, None], first[rows + 1, None]
    lone = np.flatnonzero(lengths == 1)
    arrays: list[Array] = [rows, lone, first[lone]]
    for done in range(0, int(lengths.max()), size):
        n = int((lengths[rows] > done).sum())
        if not n:
            break
        places = begin[:n] + done + np.arange(size)
        there = places < end[:n]
        places = np.minimum(places, end[:n] - 1)
        arrays += [places, there, np.flatnonzero(there), places[there]]
    here = send(arrays)
    turns = [Turn(*here[i : i + 4]) for i in range(3, len(here), 4)]
    return Chunks(rows=here[0], turns=turns, lone_rows=here[1], lone_places=here[2])
