"""Videos of Qwen-Omni: frames as of Qwen2.5-VL, and moments by what is asked for, not what is seen.

A grid of frames lies so many positions behind the one before as its seconds have tokens of a sound.
These seconds are `transformers`' `video_second_per_grid`: by the frames in a second that were asked
for, also where the video is so short or so long that others are seen.

Sources: `transformers`' processors of both families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tgi_trio.media.patch_canvases import Qwen2Canvas
from tgi_trio.media.video_canvas import Clip


class Qwen25OmniCanvas(Qwen2Canvas):
    """Qwen2.5-Omni: limits on a frame's pixels are the processor's, whatever the files say."""

    SETTLED: ClassVar[tuple[str, ...]] = ("num_frames",)  # which say no seconds
    POSITIONS: ClassVar[int] = 25  # in a second

    @classmethod
    def read(cls, settings: Mapping[str, Any], max_frames: int) -> Self:
        own = {**settings, "size": cls.DEFAULTS["size"], "min_pixels": None, "max_pixels": None}
        return super().read(own, max_frames)

    def with_rate(self, rate: float) -> Self:
        return self.with_frames(rate, None)

    def count_seconds(self, clip: Clip) -> float:
        return self.step / self.fps

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        rows, columns = super().fit(frames, height, width)
        grids = self.count_grids(frames)
        if (grids - 1) * self.step / self.fps * self.POSITIONS >= grids * rows * columns:
            raise ValueError(
                f"at {self.fps:g} frames in a second it has more moments than tokens: ask for more "
                "(`fps`)"
            )
        return rows, columns


class Qwen3OmniCanvas(Qwen25OmniCanvas):
    """Qwen3-Omni: with larger patches, and a token of a sound lasts a thirteenth of a second."""

    DEFAULTS: ClassVar = {
        **Qwen2Canvas.DEFAULTS,
        **{"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}},
        "patch_size": 16,
    }
    POSITIONS: ClassVar[int] = 13

    def with_frames(self, fps: float | None, num_frames: int | None) -> Self:
        """Refuses rates whose moments would lie between two positions, which are whole here."""
        found = super().with_frames(fps, num_frames)
        if not (self.step * self.POSITIONS / found.fps).is_integer():
            raise ValueError(
                f"at {found.fps:g} frames in a second its moments lie between this model's "
                f"positions, of which there are {self.POSITIONS} in a second: ask for 0.5, 1 or 2 "
                "(`fps`)"
            )
        return found
