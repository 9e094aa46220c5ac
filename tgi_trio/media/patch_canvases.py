"""Videos whose frames are cut into patches: Qwen-VL and GLM-V.

Sources: `transformers`' video processors of these families (`sample_frames`, `smart_resize`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, ClassVar, Final, Self

import numpy as np

from tgi_trio.media.video_canvas import SCALED, Clip, VideoCanvas, check_numbers

_STEEPEST: Final = 200  # most of the longer side over the shorter one
_MANY: Final = 2**31
# GLM-4.6V: frames in a second of what lasts so many seconds at most, and bounds for longer ones.
_GLM_RATES: Final = ((30, 3), (300, 1), (2400, 0.5))
_GLM_LONGEST, _GLM_FRAMES = 2400, 640


@dataclass(frozen=True, kw_only=True)
class PatchCanvas(VideoCanvas):
    """Frames at a size of their own, within limits, cut into patches that several of them share."""

    patch: int  # pixels along a side
    merge: int  # patches along a side of what becomes one token
    least: int  # pixels
    most: int
    min_frames: int
    capped: bool  # a frame of many has fewer pixels
    max_tokens: int  # where `capped`
    max_duration: float = 0  # seconds, of families that look at it

    @classmethod
    def read(cls, settings: Mapping[str, Any], max_frames: int) -> Self:
        found = cls._settle(settings)
        size = {**cls.DEFAULTS["size"], **found["size"]}
        if cls.DEFAULTS["size_by_pixels"]:
            size["shortest_edge"] = found.get("min_pixels", size["shortest_edge"])
            size["longest_edge"] = found.get("max_pixels", size["longest_edge"])
        whole = {
            "patch": found["patch_size"],
            "merge": found["merge_size"],
            "step": found["temporal_patch_size"],
            "least": size["shortest_edge"],
            "most": size["longest_edge"],
            "min_frames": found["min_frames"],
            "max_frames": found["max_frames"],
            "max_tokens": found["max_video_tokens"],
        }
        number = None if "num_frames" in cls.SETTLED else found.get("num_frames")
        check_numbers(
            whole | ({} if number is None else {"num_frames": number}),
            {name: found[name] for name in ("fps", "max_duration") if name in found},
        )
        return cls(
            **{**whole, "max_frames": min(whole["max_frames"], max_frames)},
            resample=int(found["resample"]),
            fps=float(found["fps"]),
            num_frames=number,
            capped=bool(found.get("cap_pixels_per_frame")),
            max_duration=found.get("max_duration", 0),
        )

    @property
    def unit(self) -> int:
        """The side of a merged patch in pixels."""
        return self.patch * self.merge

    def count_grids(self, frames: int) -> int:
        """Return how many grids of patches so many frames become; the last is filled up."""
        return -(-frames // self.step)

    def count_seconds(self, clip: Clip) -> float:
        """Return the seconds from one grid of a video to the next."""
        return self.step / clip.seen_rate

    @abstractmethod
    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of merged patches of each of so many frames.

        Raises ValueError for frames that are too long and narrow.
        """


class Qwen2Canvas(PatchCanvas):
    """Qwen2-VL and Qwen2.5-VL: limits on pixels are those of a frame.

    Where their files say nothing, all frames would be seen; these models were made for two in a
    second (`qwen_vl_utils`).
    """

    DEFAULTS: ClassVar = {
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": 3},
        **{"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}},
        **{"min_frames": 4, "max_frames": 768, "fps": 2, "max_video_tokens": 128000},
        **{"do_resize": True, "size_by_pixels": True, **SCALED},
        **{"image_mean": [0.48145466, 0.4578275, 0.40821073]},
        **{"image_std": [0.26862954, 0.26130258, 0.27577711]},
    }

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        if self.num_frames is not None:
            count = min(max(round(self.num_frames / self.step), 1), total // self.step) * self.step
        else:
            most = min(self.max_frames, total) // self.step * self.step
            wanted = min(max(total / rate * self.fps, self.min_frames), most, total)
            count = max(floor(wanted / self.step), 1) * self.step
        # As float32, which they are there.
        places = (np.arange(count) * (total / count)).astype(np.float32)
        return tuple(np.minimum(places.astype(np.int64), total - 1).tolist())

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        most = self.most
        if self.capped:
            whole = int(self.max_tokens * self.unit**2 * 0.9)
            most = max(min(most, whole * self.step // frames), int(self.least * 1.05))
        return _fit(height, width, self.unit, self.least, most, 1, 1)


class Qwen3Canvas(PatchCanvas):
    """Qwen3-VL and Qwen 3.5: limits on pixels are those of all frames together."""

    DEFAULTS: ClassVar = {
        **{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "resample": 3},
        **{"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}},
        **{"min_frames": 4, "max_frames": 768, "fps": 2, "max_video_tokens": 768},
        **{"do_resize": True, "size_by_pixels": False, **SCALED},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    }

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        count = self.num_frames
        if count is None:
            wanted = int(total / rate * self.fps)
            count = min(max(wanted, self.min_frames), self.max_frames, total)
        return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        most = self.most
        if self.capped:
            of_frame = max(
                min(self.max_tokens * self.unit**2, most // frames), int(self.least * 1.05)
            )
            most = of_frame * frames
        if height < self.unit or width < self.unit:
            grow = max(self.unit / height, self.unit / width)
            height, width = int(height * grow), int(width * grow)
        rounded = round(frames / self.step) * self.step
        return _fit(height, width, self.unit, self.least, most, frames, rounded)


class GlmCanvas(PatchCanvas):
    """GLM-4.1V and GLM-4.5V: so many frames in a second of what is not too long."""

    DEFAULTS: ClassVar = {
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": 3},
        **{"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}},
        **{"min_frames": 1, "max_frames": _MANY, "fps": 2, "max_video_tokens": 1},
        **{"do_resize": True, "size_by_pixels": False, "max_duration": 300, **SCALED},
        **{"image_mean": [0.48145466, 0.4578275, 0.40821073]},
        **{"image_std": [0.26862954, 0.26130258, 0.27577711]},
    }
    SETTLED: ClassVar[tuple[str, ...]] = ("num_frames",)

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        last, seconds = total - 1, total / rate
        if seconds <= self.max_duration:
            count = max(floor(seconds * self.fps), 1)
            return self._pair([min(last, ceil(i * rate / self.fps)) for i in range(count)])
        count = int(self.max_duration * self.fps)
        if count >= total:
            return self._pair(range(total))
        return self._pair([min(last, ceil(t * rate)) for t in np.linspace(0, seconds, count)])

    def _pair(self, frames: Iterable[int]) -> tuple[int, ...]:
        """Return each of them once, no more than allowed, and the last twice if they are odd."""
        found = list(dict.fromkeys(frames))
        if len(found) > self.max_frames:
            kept = np.linspace(0, len(found) - 1, self.max_frames).round().astype(int)
            found = [found[i] for i in kept]
        return tuple([*found, found[-1]] if len(found) % 2 else found)

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        if height < self.unit or width < self.unit:
            grow = max(self.unit / height, self.unit / width)
            height, width = int(height * grow), int(width * grow)
        rounded = round(frames / self.step) * self.step
        return _fit(height, width, self.unit, self.least, self.most, frames, rounded)


class Glm46Canvas(GlmCanvas):
    """GLM-4.6V: the longer a video, the fewer frames in a second."""

    SETTLED: ClassVar[tuple[str, ...]] = ("num_frames", "fps")

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        seconds = total / rate
        shown = min(seconds, _GLM_LONGEST)
        fps = next(fps for most, fps in _GLM_RATES if shown <= most)
        count = min(int(shown * fps * self.step), _GLM_FRAMES)
        found: list[int] = []
        if total >= count:
            found = self._walk(total, rate, int(seconds), 1 / (self.step * fps))
        if total < count or len(found) > count:
            found = np.linspace(0, total - 1, count, dtype=int).tolist()
        elif len(found) < count:
            found = np.linspace(found[0], found[-1], count, dtype=int).tolist()
        return self._pair(found or (0, total - 1))  # of a sixth of a second, and less

    def _walk(self, total: int, rate: float, end: int, apart: float) -> list[int]:
        """Return the first frame at each moment, these so many seconds `apart`, until the end."""
        found: list[int] = []
        second, frame_time = 0.0, 1 / rate
        for frame in range(total):
            if frame * frame_time >= second:
                second += apart
                found.append(frame)
                if second >= end:
                    break
        return found


def _fit(
    height: int, width: int, unit: int, least: int, most: int, frames: int, rounded: int
) -> tuple[int, int]:
    """Return rows and columns of units, whose pixels are within limits.

    `frames`: that share the limits; `rounded`: as they are first counted. Raises ValueError.
    """
    steep = max(height, width) / min(height, width)
    if steep > _STEEPEST:
        raise ValueError(
            f"one side is {steep:.0f} times as long as the other, and this model takes {_STEEPEST}"
        )
    rows, columns = round(height / unit), round(width / unit)
    if rounded * rows * columns * unit**2 > most:
        shrink = sqrt(frames * height * width / most)
        rows = max(1, floor(height / shrink / unit))
        columns = max(1, floor(width / shrink / unit))
    elif rounded * rows * columns * unit**2 < least:
        grow = sqrt(least / (frames * height * width))
        rows, columns = ceil(height * grow / unit), ceil(width * grow / unit)
    return rows, columns
