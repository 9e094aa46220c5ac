"""Rows of unequal length cut into chunks.

The first chunks of all rows are computed together, then the second ones of those that have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Where the tokens of longer rows lie; rows of one token are apart. All on the device."""

    rows: torch.Tensor  # int64 [N] of more than one token, the longest first
    # Per turn the places [n, L] of tokens in the flat list, of the first n of `rows`, and which of
    # them are tokens; what is behind a row's last is that token again.
    turns: list[tuple[torch.Tensor, torch.Tensor]]
    lone_rows: torch.Tensor  # int64 of one token
    lone_places: torch.Tensor  # and where these are


def cut_rows(starts: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Return the chunks of at most `size` tokens of rows that start at `starts`, cumulative."""
    first = torch.tensor(starts)
    lengths = first.diff()
    rows = torch.argsort(lengths, descending=True, stable=True)
    rows = rows[lengths[rows] > 1]
    size = min(size, int(lengths.max()))
    begin, end = first[rows, None], first[rows + 1, None]
    turns = []
    for done in range(0, int(lengths.max()), size):
        n = int((lengths[rows] > done).sum())
        if not n:
            break
        places = begin[:n] + done + torch.arange(size)
        there = places < end[:n]
        turns.append((places.minimum(end[:n] - 1).to(device), there.to(device)))
    lone = torch.nonzero(lengths == 1).squeeze(1)
    return Chunks(rows.to(device), turns, lone.to(device), first[lone].to(device))
