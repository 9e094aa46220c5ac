"""Tables of rotary embeddings: cosines and sines, a row for each position.

If frequencies depend on the length of the sequence (dynamic, longrope), these rows are for short
sequences. After them is room for the tokens of one step, whose rows are computed when they belong
to longer sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.head_order import needs_order, widen
from tgi_trio.shard.positions.rotary_frequencies import (
    compute_frequencies,
    rotary_axes,
    rotary_frequencies,
    short_length,
)

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Table:
    cosines: Floats  # [rows, pairs]
    sines: Floats
    head_dim: int  # 0: only pairs that are rotated


class RotaryTables:
    """The tables of a model for positions below a bound."""

    def __init__(
        self,
        rotaries: Iterable[tuple[RotarySpec, int]],
        count: int,
        tokens: int,
        *,
        whole: bool,
        factors: Floats | None = None,
    ) -> None:
        """Compute the tables of `rotaries`, each with its head size, for positions below `count`.

        `tokens`: the most in a step. `whole`: heads are rotated as a whole, in another order if
        they need one. `factors` [pairs]: of frequencies, where these are learned.
        """
        self._factors = factors
        rotaries = list(rotaries)
        lengths = [length for own, _ in rotaries if (length := short_length(own)) is not None]
        self._short = min(lengths, default=None)
        self._near = count if self._short is None else min(count, self._short)
        room = 0 if self._short is None else tokens
        self._tables: dict[tuple[RotarySpec, int], _Table] = {}
        self._held: dict[tuple[RotarySpec, int], dict[str, NDArray[Any]]] = {}
        for key in rotaries:
            if key not in self._tables:
                self._make(key, count, room, whole=whole)

    def fields(self, rotary: RotarySpec, head_dim: int) -> dict[str, int]:
        """Return the fields of an operation for a layer's rotary embedding."""
        key = rotary, head_dim
        held = {name: address(array) for name, array in self._held[key].items()}
        return held | {"rotated": 2 * self._tables[key].cosines.shape[1]}

    def rows(self, rotary: RotarySpec, head_dim: int) -> tuple[Floats, Floats]:
        """Return cosines and sines, float32 [rows, pairs]."""
        table = self._tables[rotary, head_dim]
        return table.cosines, table.sines

    def turn_far(self, positions: Ints, lengths: Ints | None) -> Ints | None:
        """Return the table rows int32 [T] for a step's tokens; None: `positions`.

        `lengths`: int32 [T], of their sequences when they were first computed; None: up to them.
        """
        if self._short is None:
            return None
        lengths = positions + 1 if lengths is None else lengths
        far = np.flatnonzero(lengths > self._short)
        if not len(far):
            return None
        turns = positions.copy()
        turns[far] = self._near + np.arange(len(far))
        for (rotary, _), table in self._tables.items():
            frequencies, scales = compute_frequencies(rotary, lengths[far].astype(np.int64))
            pairs = _spread(rotary, table.head_dim, positions[far], frequencies, scales)
            for rows, made in zip((table.cosines, table.sines), pairs, strict=True):
                rows[self._near : self._near + len(far)] = made
        return turns

    def _make(self, key: tuple[RotarySpec, int], count: int, room: int, *, whole: bool) -> None:
        rotary, head_dim = key
        size = head_dim if whole and needs_order(rotary) else 0
        frequencies, scale = rotary_frequencies(rotary)
        if rotary.learned and self._factors is not None:
            frequencies = frequencies * self._factors
        cosines, sines = _spread(rotary, size, np.arange(self._near), frequencies, scale)
        if room:
            cosines, sines = (np.pad(rows, ((0, room), (0, 0))) for rows in (cosines, sines))
        self._tables[key] = _Table(cosines, sines, size)
        held: dict[str, NDArray[Any]] = {"cosines": cosines, "sines": sines}
        if (axes := rotary_axes(rotary)) is not None:
            padding = (0, cosines.shape[1] - len(axes))  # for pairs that are not rotated
            held["axes"] = np.pad(axes.astype(np.int32), padding)
        if (by := rotary.query_scale) is not None:
            steps = (np.arange(count) + by.offset) // by.step
            held["query_scales"] = np.float32(1.0) + np.float32(by.beta) * np.log1p(
                steps.astype(np.float32)
            )
        if rotary.log_positions:
            held["logs"] = np.log(np.arange(1, count + 1, dtype=np.float32))
        self._held[key] = held


def _spread(
    rotary: RotarySpec,
    head_dim: int,
    positions: NDArray[np.integer],
    frequencies: Floats,
    scales: Floats | float,
) -> tuple[Floats, Floats]:
    """Return cosines and sines, float32 [positions, pairs], with the pairs of a whole head unless
    `head_dim` is 0.
    """
    angles = positions[:, None].astype(np.float32) * frequencies
    as_scaled = np.asarray(scales, np.float32)
    cosines, sines = np.cos(angles) * as_scaled, np.sin(angles) * as_scaled
    if not head_dim:
        return cosines, sines
    return widen(cosines, head_dim, 1.0), widen(sines, head_dim, 0.0)
