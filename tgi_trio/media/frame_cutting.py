"""Resizes the frames of a video, and makes of them what its model's tower reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.media.cutting import Arrays
from tgi_trio.media.frame_canvases import FrameCanvas
from tgi_trio.media.patch_canvases import PatchCanvas
from tgi_trio.media.video_canvas import Clip, VideoCanvas

Pixels = NDArray[np.uint8]


class FrameCutter(ABC):
    """A canvas's way to cut frames; all pixels are uint8."""

    @abstractmethod
    def count_bytes(self, clip: Clip) -> int:
        """Return the bytes of the pixels. Raises ValueError where `cut` does for any frames."""

    @abstractmethod
    def cut(self, frames: Iterator[Pixels], clip: Clip) -> Arrays:
        """Return arrays of frames uint8 [height, width, 3], as many as the clip says."""


@dataclass(frozen=True)
class PatchCutter(FrameCutter):
    """`pixel_values` [patches, 3 * step * N], N pixels of a channel of a patch in a frame;
    `image_grid_thw` [1, 3] says grids, rows and columns; `seconds_per_grid` float32 [1].
    """

    canvas: PatchCanvas

    def count_bytes(self, clip: Clip) -> int:
        grids, patches, numbers = self._shape(clip)
        return grids * patches * numbers

    def cut(self, frames: Iterator[Pixels], clip: Clip) -> Arrays:
        count, canvas = len(clip.frames), self.canvas
        step, side, merge = canvas.step, canvas.patch, canvas.merge
        rows, columns = canvas.fit(count, clip.height, clip.width)
        grids, patches, numbers = self._shape(clip)
        size = rows * canvas.unit, columns * canvas.unit
        found = np.empty((grids, patches, numbers), np.uint8)
        group = np.empty((step, *size, 3), np.uint8)
        for i, frame in enumerate(frames):
            group[i % step] = _resize(frame, (size,), canvas.resample)
            if i + 1 == count:
                group[i % step :] = group[i % step]  # the last one is repeated
            if i + 1 == count or (i + 1) % step == 0:
                parts = group.reshape(step, rows, merge, side, columns, merge, side, 3)
                cut = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(patches, numbers)
                found[i // step] = cut
        return {
            "pixel_values": found.reshape(-1, numbers),
            "image_grid_thw": np.array([[grids, rows * merge, columns * merge]]),
            "seconds_per_grid": np.array([canvas.count_seconds(clip)], np.float32),
        }

    def _shape(self, clip: Clip) -> tuple[int, int, int]:
        count, canvas = len(clip.frames), self.canvas
        rows, columns = canvas.fit(count, clip.height, clip.width)
        patches, numbers = rows * columns * canvas.merge**2, 3 * canvas.step * canvas.patch**2
        return canvas.count_grids(count), patches, numbers


@dataclass(frozen=True)
class FrameStacker(FrameCutter):
    """`pixel_values` [frames, 3, height, width], perhaps in a batch of one; `num_frames` [1]."""

    canvas: FrameCanvas

    def count_bytes(self, clip: Clip) -> int:
        return len(clip.frames) * 3 * self.canvas.height * self.canvas.width

    def cut(self, frames: Iterator[Pixels], clip: Clip) -> Arrays:
        count, canvas = len(clip.frames), self.canvas
        found = np.empty((count, 3, canvas.height, canvas.width), np.uint8)
        sizes = canvas.resizes(clip.height, clip.width)
        for i, frame in enumerate(frames):
            found[i] = np.moveaxis(_resize(frame, sizes, canvas.resample), 2, 0)
        pixels = found[None] if canvas.IN_BATCH else found
        return {"pixel_values": pixels, "num_frames": np.array([count])}


def choose_cutter(canvas: VideoCanvas) -> FrameCutter:
    """Return what cuts frames for a canvas."""
    match canvas:
        case PatchCanvas():
            return PatchCutter(canvas)
        case FrameCanvas():
            return FrameStacker(canvas)
        case _:
            raise TypeError(f"nothing cuts frames for {type(canvas).__name__}")


def _resize(frame: Pixels, sizes: tuple[tuple[int, int], ...], resample: int) -> Pixels:
    """Return a frame after it has had these sizes (height, width), one after the other."""
    from PIL import Image

    shown: Image.Image = Image.fromarray(frame)
    for height, width in sizes:
        if shown.size != (width, height):
            shown = shown.resize((width, height), Image.Resampling(resample))
    return np.asarray(shown)
