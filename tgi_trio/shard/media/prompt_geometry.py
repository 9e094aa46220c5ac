"""What images change in a prompt: rotary positions, attention masks, and where a step may end.

Qwen's families give each token three rotary positions (Wang and others 2024, "Qwen2-VL", 2.1, known
as M-RoPE). An image's merged grid begins at the position after the text before it, its rows and
columns count from there, and the text behind it begins after the longer side. So text behind an
image has positions that lag behind its place in the sequence, by a constant up to the next image.
The grids of a video count as well, one by one or (Qwen2.5-VL) by the seconds that they show, and
text begins behind the last of them too. So the paper has it, and transformers before release 5; in
5.24 `get_rope_index` forgets them there, and text lies beside a long video instead of behind it.
Where text stands between a video's grids (Qwen3-VL), each is as an image.

In other families the tokens of an image attend to each other in both directions. What layers make
of the first ones then depends on the last, so one step has to compute all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.images import SequenceImage
from tgi_trio.model.image_rules import ImageRules

Ints = NDArray[np.int64]
PARTS: Final = 3  # of a rotary position: time, row, column


class ImageGrid(NamedTuple):
    """Feature tokens of an image, row by row, or of a video's grids of these."""

    first: int  # place of the first in the prompt
    rows: int  # as the tower's features are merged
    columns: int
    grids: int = 1
    # Positions from one grid to the next, as two factors: a grid's number is multiplied by one, and
    # then by the other, and what comes of it is cut off to a whole one.
    interval: float = 1.0
    more: float = 1.0


class BundleGrid(NamedTuple):
    """What a bundle says of its features' places."""

    rows: int
    columns: int
    grids: int = 1
    interval: float = 1.0
    more: float = 1.0


def _no_spans() -> Ints:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PromptGeometry:
    """Of one prompt; a prompt without images has none."""

    # [parts, N] time, row and column of the first N tokens (Hunyuan VL: `turn_by_numbers`). None:
    # every token's place in the sequence.
    turns: Ints | None = None
    # [S, 2] rising, (first, end) of tokens that see one another, and are computed in one step.
    spans: Ints = field(default_factory=_no_spans)

    @property
    def parts(self) -> int:
        """How many parts the rotary positions of tokens have."""
        return PARTS if self.turns is None else len(self.turns)

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
        """Write rotary positions of the tokens from place `first` on into `positions` [parts, n].

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
    grids: Sequence[BundleGrid],
    prompt_length: int,
) -> PromptGeometry | None:
    """Return what a prompt's images change by a model's rules; None: nothing.

    `grids`: of each image's features, looked at where tokens turn by them. Raises ValueError for
    one that does not make up the image's features, which are to be together then, or each grid's.
    """
    if not images:
        return None
    runs = [[(each.first + at, count) for at, count in each.runs] for each in images]
    if rules.merge:
        placed = [
            grid for run, own in zip(runs, grids, strict=True) for grid in _place_grids(run, own)
        ]
        geometry = PromptGeometry(turn_by_grids(placed))
        if geometry.delta > 0:  # tables of turns are as long as a sequence
            raise ValueError("a video shows more seconds than it has tokens")
        return geometry
    if rules.image_attention == "prompt":
        return PromptGeometry(spans=np.array([[0, prompt_length]]))
    if rules.image_attention == "image":
        spans = [(first, first + count) for run in runs for first, count in run]
        return PromptGeometry(spans=np.array(spans))
    return None


def _place_grids(runs: Sequence[tuple[int, int]], grid: BundleGrid) -> list[ImageGrid]:
    """Return where an image's features are by its runs (first place, tokens); raises ValueError."""
    rows, columns, grids, *factors = grid
    counts = [count for _, count in runs]
    if counts == [grids * rows * columns]:
        return [ImageGrid(runs[0][0], rows, columns, grids, *factors)]
    if counts != [rows * columns] * grids:
        several = f"{grids} times " if grids > 1 else ""
        raise ValueError(
            f"an image of {several}{rows} x {columns} features has {sum(counts)} tokens for them, "
            f"in {len(runs)} runs"
        )
    return [ImageGrid(first, rows, columns) for first, _ in runs]


def turn_by_grids(grids: Sequence[ImageGrid]) -> Ints:
    """Return three positions [3, N] of a prompt's tokens, up to the last of its last image.

    `grids` in the order of their places. They are what transformers' `get_rope_index` returns, but
    for text behind a video of more grids than rows and columns.
    """
    parts: list[Ints] = []
    place = position = 0
    for grid in grids:
        text = grid.first - place
        parts.append(np.tile(np.arange(position, position + text), (3, 1)))
        position += text
        number, within = np.divmod(
            np.arange(grid.grids * grid.rows * grid.columns), grid.rows * grid.columns
        )
        row, column = np.divmod(within, grid.columns)
        moments = number.astype(np.float32) * np.float32(grid.interval) * np.float32(grid.more)
        time = moments.astype(np.int64)
        parts.append(position + np.stack((time, row, column)))
        place = grid.first + len(number)
        position += max(grid.rows, grid.columns, int(time[-1]) + 1)
    return np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)
