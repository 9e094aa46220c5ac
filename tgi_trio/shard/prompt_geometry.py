"""What images change in a prompt: rotary positions, attention masks, and where a step may end.

Qwen's families give each token three rotary positions (Wang and others 2024, "Qwen2-VL", 2.1, known
as M-RoPE). An image's merged grid begins at the position after the text before it, its rows and
columns count from there, and the text behind it begins after the longer side. So text behind an
image has positions that lag behind its place in the sequence, by a constant up to the next image.

In other families the tokens of an image attend to each other in both directions. What layers make
of the first ones then depends on the last, so one step has to compute all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.images import SequenceImage
from tgi_trio.model.image_rules import ImageRules

Ints = NDArray[np.int64]


class ImageGrid(NamedTuple):
    """Feature tokens of an image, row by row."""

    first: int  # place of the first in the prompt
    rows: int  # as the tower's features are merged
    columns: int


def _no_spans() -> Ints:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PromptGeometry:
    """Of one prompt; a prompt without images has none."""

    # [3, N] time, row and column of the first N tokens. None: every token's place in the sequence.
    turns: Ints | None = None
    # [S, 2] rising, (first, end) of tokens that see one another, and are computed in one step.
    spans: Ints = field(default_factory=_no_spans)

    @property
    def delta(self) -> int:
        """Rotary position of the tokens behind those of `turns`, less their place; never positive.

        transformers' `rope_deltas`.
        """
        if self.turns is None or not self.turns.size:
            return 0
        count: int = self.turns.shape[1]
        return int(self.turns.max()) + 1 - count

    def turn(self, first: int, positions: Ints) -> None:
        """Write the rotary positions of the tokens from place `first` on into `positions` [3, n].

        Those behind `turns` stay as they are.
        """
        if self.turns is not None:
            own = self.turns[:, first : first + positions.shape[1]]
            positions[:, : own.shape[1]] = own

    def lasts(self, places: Ints) -> Ints:
        """Return the last place that the tokens at `places` see."""
        if not len(self.spans):
            return places
        firsts, ends = self.spans.T
        span = np.minimum(np.searchsorted(ends, places, side="right"), len(ends) - 1)
        inside = (places >= firsts[span]) & (places < ends[span])
        return np.where(inside, ends[span] - 1, places)

    def fit(self, first: int, count: int) -> int:
        """Return how many of `count` tokens from place `first` on a step takes: no part of a span.

        0 where they are less than what is left of one.
        """
        firsts, ends = self.spans.T
        cut = np.flatnonzero((firsts < first + count) & (first + count < ends))
        return count if not len(cut) else max(0, int(firsts[cut[0]]) - first)

    def least(self, first: int) -> int:
        """Return how many tokens from place `first` on are computed in one step, at least."""
        firsts, ends = self.spans.T
        around = np.flatnonzero((firsts <= first) & (first < ends))
        return int(ends[around[0]]) - first if len(around) else 1


def shape_prompt(
    rules: ImageRules,
    images: Sequence[SequenceImage],
    grids: Sequence[tuple[int, int]],
    prompt_length: int,
) -> PromptGeometry | None:
    """Return what a prompt's images change by a model's rules; None: nothing.

    `grids`: rows and columns of each image's features, looked at where tokens turn by them. Raises
    ValueError for one that does not make up the image's features, which are to be together then.
    """
    if not images:
        return None
    runs = [[(each.first + at, count) for at, count in each.runs] for each in images]
    if rules.merge:
        for each, (rows, columns) in zip(images, grids, strict=True):
            if len(each.runs) != 1 or rows * columns != each.features:
                raise ValueError(
                    f"an image of {rows} x {columns} features has {each.features} tokens for them, "
                    f"in {len(each.runs)} runs"
                )
        placed = zip(runs, grids, strict=True)
        return PromptGeometry(turn_by_grids([ImageGrid(run[0][0], *grid) for run, grid in placed]))
    if rules.sight == "prompt":
        return PromptGeometry(spans=np.array([[0, prompt_length]]))
    if rules.sight == "image":
        spans = [(first, first + count) for run in runs for first, count in run]
        return PromptGeometry(spans=np.array(spans))
    return None


def turn_by_grids(grids: Sequence[ImageGrid]) -> Ints:
    """Return three positions [3, N] of a prompt's tokens, up to the last of its last image.

    `grids` in the order of their places. They are what transformers' `get_rope_index` returns.
    """
    parts: list[Ints] = []
    place = position = 0
    for grid in grids:
        text = grid.first - place
        parts.append(np.tile(np.arange(position, position + text), (3, 1)))
        position += text
        row, column = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
        parts.append(position + np.stack((np.zeros_like(row), row, column)))
        place = grid.first + grid.rows * grid.columns
        position += max(grid.rows, grid.columns)
    return np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)
