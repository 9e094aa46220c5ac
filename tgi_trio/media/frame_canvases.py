"""Videos of which each frame is seen as an image of one size: SmolVLM and InternVL.

Sources: `transformers`' video processors of these families (`sample_frames`, `resize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Final, Self

import numpy as np

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.video_canvas import SCALED, VideoCanvas, check_numbers

_LARGEST: Final = 4096  # most pixels of a side, whatever the settings say
_SKIPPED: Final = 1  # seconds at the beginning and the end of what is long


@dataclass(frozen=True, kw_only=True)
class FrameCanvas(VideoCanvas):
    """A size for all frames of all videos."""

    height: int  # pixels
    width: int

    IN_BATCH: ClassVar[bool] = False  # the tower reads [1, frames, 3, height, width]

    def resizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """Return the sizes (height, width) that a frame gets one after the other."""
        return ((self.height, self.width),)


@dataclass(frozen=True, kw_only=True)
class SmolCanvas(FrameCanvas):
    """SmolVLM: frames are scaled to a longer side, then to a square.

    Of `video_sampling`, how many frames are seen at most. Where files say nothing, it is what
    SmolVLM2's say.
    """

    longest: int  # pixels, of the first scaling

    IN_BATCH: ClassVar[bool] = True
    BOUNDS: ClassVar[bool] = True
    DEFAULTS: ClassVar = {
        **{"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}},
        **{"fps": 1, "num_frames": 64, "do_resize": True, "resample": 1, **SCALED},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    }

    @classmethod
    def read(cls, settings: Mapping[str, Any], max_frames: int) -> Self:
        sampling = settings.get("video_sampling")
        if isinstance(sampling, Mapping):
            told = {
                "size": sampling.get("video_size"),
                "num_frames": sampling.get("max_frames"),
                "fps": sampling.get("fps"),
            }
            # As there, a size beside it counts.
            kept = {name: settings[name] for name in ("size",) if settings.get(name)}
            settings = {**settings, **told, **kept}
        found = cls._settle(settings)
        square = found["max_image_size"]
        whole = {
            "longest": found["size"].get("longest_edge"),
            "height": square.get("longest_edge") if isinstance(square, Mapping) else square,
            "num_frames": found["num_frames"],
        }
        check_numbers(whole, {"fps": found["fps"]})
        return cls(
            **{**whole, "num_frames": min(whole["num_frames"], max_frames)},
            width=whole["height"],
            step=1,
            resample=int(found["resample"]),
            fps=float(found["fps"]),
            max_frames=max_frames,
        )

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        seconds, most = total / rate, self.num_frames or self.max_frames
        count = max(min(round(self.fps * seconds), most), 1)
        first, last = 0, total - 1
        if seconds - 2 * _SKIPPED > most * self.fps:
            first, last = int(_SKIPPED * rate), min(int(total - _SKIPPED * rate), total - 1)
        if first >= last:
            first, last = 0, total - 1
        return tuple(np.unique(np.linspace(first, last, count, dtype=int)).tolist())

    def resizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        longest, shape = min(self.longest, _LARGEST), width / height
        if width >= height:
            other = int(longest / shape)
            first = max(other + other % 2, 1), longest
        else:
            other = int(longest * shape)
            first = longest, max(other + other % 2, 1)
        return (first, (self.height, self.width))


@dataclass(frozen=True, kw_only=True)
class InternCanvas(FrameCanvas):
    """InternVL: so many frames of any video, from the middle of as many parts of it.

    Where neither a client nor files say how many, they are eight, as in the examples of these
    models; of a video that has fewer, all.
    """

    usual: int  # frames, where a client does not say
    shift: float | None  # frames before the first one; None: half of a part

    DEFAULTS: ClassVar = {
        **{"size": {"height": 384, "width": 384}, "initial_shift": True, "num_frames": 8},
        **{"do_resize": True, "do_center_crop": False, "resample": 3, **SCALED},
        **{"image_mean": [0.48145466, 0.4578275, 0.40821073]},
        **{"image_std": [0.26862954, 0.26130258, 0.27577711]},
    }

    @classmethod
    def read(cls, settings: Mapping[str, Any], max_frames: int) -> Self:
        found = cls._settle(settings)
        if found["do_center_crop"]:
            raise ModelLoadError("its frames are cropped (do_center_crop), which is not built here")
        shift, fps = found["initial_shift"], found.get("fps")
        whole = {
            "height": found["size"].get("height"),
            "width": found["size"].get("width"),
            "num_frames": found["num_frames"],
        }
        check_numbers(whole, {} if fps is None else {"fps": fps})
        if not isinstance(shift, int | float) or not shift >= 0:
            raise ModelLoadError(f"the settings of its video processor have initial_shift {shift}")
        return cls(
            height=whole["height"],
            width=whole["width"],
            usual=whole["num_frames"],
            shift=None if shift is True else float(shift),
            step=1,
            resample=int(found["resample"]),
            # As there, a number of frames counts before a rate.
            fps=float(fps) if fps is not None and settings.get("num_frames") is None else 0.0,
            num_frames=None,
            max_frames=max_frames,
        )

    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        count = self.num_frames
        if count is None:
            count = int(total / rate * self.fps) if self.fps else self.usual
            count = max(min(count, self.max_frames, total), 1)
        part = total / count
        shift = part / 2 if self.shift is None else self.shift
        # As float32, which they are there.
        places = (shift + part * np.arange(ceil((total - shift) / part))).astype(np.float32)
        return tuple(np.minimum(places.astype(np.int64), total - 1).tolist())
