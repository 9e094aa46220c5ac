"""A video without its pixels, and what all families' rules for its frames have in common.

For who counts tokens and who makes pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Self

from tgi_trio.errors import ModelLoadError

SCALED: Final = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


class Clip(NamedTuple):
    """What is known of a video without its pixels."""

    height: int  # of a frame as it is seen, in pixels
    width: int
    frames: tuple[int, ...]  # numbers of those that are seen, ascending
    total: int  # frames of all
    rate: float  # of these, in a second

    @property
    def seen_rate(self) -> float:
        """Frames that are seen in a second."""
        return len(self.frames) / self.total * self.rate


@dataclass(frozen=True, kw_only=True)
class VideoCanvas(ABC):
    """A family's rules for which frames are seen and in which size, with a model's own numbers."""

    step: int  # frames of a patch; 1: each frame is seen by itself
    resample: int  # Pillow's number
    fps: float  # frames that are seen in a second; 0: as many of any video
    num_frames: int | None  # that are seen of any video, whatever its length
    max_frames: int

    SETTLED: ClassVar[tuple[str, ...]] = ()  # what no client may ask for
    BOUNDS: ClassVar[bool] = False  # `num_frames` are the most that are seen, whatever `fps` says
    DEFAULTS: ClassVar[Mapping[str, Any]]  # of transformers' class, where a model's files say none

    @classmethod
    @abstractmethod
    def read(cls, settings: Mapping[str, Any], max_frames: int) -> Self:
        """Return the canvas of a model, by the settings of its video processor.

        `max_frames`: the operator's bound on frames. Raises ModelLoadError.
        """

    def with_frames(self, fps: float | None, num_frames: int | None) -> Self:
        """Return the canvas where a client wants other frames; at most one of both is given.

        Raises ValueError above the operator's bound.
        """
        for name, value in (("fps", fps), ("num_frames", num_frames)):
            if value is not None and name in self.SETTLED:
                raise ValueError(f"this model's frames are not chosen by `{name}`")
        if num_frames is not None and num_frames > self.max_frames:
            raise ValueError(
                f"{num_frames} frames are asked for, {self.max_frames} are allowed "
                "(--max-video-frames, or the model's own max_frames)"
            )
        if fps is not None:
            return replace(self, fps=fps, num_frames=self.num_frames if self.BOUNDS else None)
        return self if num_frames is None else replace(self, num_frames=num_frames)

    def with_rate(self, rate: float) -> Self:
        """Return the canvas of pictures that come as a video, so many of a second, all seen.

        Raises ValueError.
        """
        return self

    def choose(self, total: int, rate: float) -> tuple[int, ...]:
        """Return the numbers of the frames that are seen, of so many at so many in a second.

        Raises ValueError for a video that is too short.
        """
        if total < self.step:
            raise ValueError(
                f"it has {total} frame{'s' * (total != 1)}, and this model sees {self.step} or "
                "more at a time: send it as an image"
            )
        if self.num_frames is not None and self.num_frames > total and not self.BOUNDS:
            raise ValueError(f"it has {total} frames, and {self.num_frames} are to be seen of it")
        return self._choose(total, rate)

    @abstractmethod
    def _choose(self, total: int, rate: float) -> tuple[int, ...]:
        """Do what `choose` does, for a video that is long enough."""

    @classmethod
    def _settle(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings with the family's own where there are none. Raises ModelLoadError."""
        found = {**cls.DEFAULTS, **{k: v for k, v in settings.items() if v is not None}}
        if not found["do_resize"]:
            raise ModelLoadError("its frames are not resized (do_resize), which is not built here")
        if not isinstance(found["size"], Mapping):
            raise ModelLoadError("the size in the settings of its video processor is no mapping")
        return found


def check_numbers(counts: Mapping[str, Any], rates: Mapping[str, Any]) -> None:
    """Raise ModelLoadError with the names of those that are no positive integers, or numbers."""
    wrong = [name for name, value in counts.items() if not _is_count(value)]
    wrong += [name for name, value in rates.items() if not _is_rate(value)]
    if wrong:
        raise ModelLoadError(
            f"the settings of its video processor need positive numbers: {', '.join(wrong)}"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
