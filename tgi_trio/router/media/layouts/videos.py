"""The tokens of a video in a prompt, from what is known of it without its pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.omni_canvases import Qwen25OmniCanvas
from tgi_trio.media.patch_canvases import PatchCanvas
from tgi_trio.media.video_canvas import Clip
from tgi_trio.model.video_families import read_positions
from tgi_trio.router.media.layouts.canvas import lay_out_internvl
from tgi_trio.router.media.layouts.grid import OMNI_MARKS
from tgi_trio.router.media.layouts.layout import ImageSettings, OtherLayout, Unmarked
from tgi_trio.router.media.layouts.spelled import spell_number
from tgi_trio.router.media.layouts.tiles import lay_out_idefics3


@dataclass(frozen=True)
class WholeLayout(Unmarked):
    """All grids of frames one behind the other: Qwen2-VL, Qwen2.5-VL.

    Where positions are by seconds, the last grid's is not beyond the tokens: a step's tables of
    turns are as long as a sequence may be.
    """

    canvas: PatchCanvas
    positions: int = 0  # in a second; 0: one for each grid
    placeholder: str = "<|video_pad|>"
    feature_token: str = "<|video_pad|>"
    around: tuple[str, str] = ("<|vision_start|>", "<|vision_end|>")

    def expand(self, clip: Clip) -> str:
        return self.feature_token * self.count_features(clip)

    def count_features(self, clip: Clip) -> int:
        grids, tokens = self.canvas.count_grids(len(clip.frames)), _count_tokens(self.canvas, clip)
        last = (grids - 1) * self.canvas.count_seconds(clip) * self.positions
        if last >= grids * tokens:
            raise ValidationError(
                f"invalid video: its {len(clip.frames)} frames show {clip.total / clip.rate:.0f} "
                "s, which is more than this model tells apart in so few: ask for more"
            )
        return grids * tokens


@dataclass(frozen=True)
class TimedLayout(Unmarked):
    """Each grid of frames between marks of its own, behind the second that it shows: Qwen3-VL."""

    canvas: PatchCanvas
    placeholder: str = "<|video_pad|>"
    feature_token: str = "<|video_pad|>"
    around: tuple[str, str] = ("<|vision_start|>", "<|vision_end|>")

    def expand(self, clip: Clip) -> str:
        start, end = self.around
        grid = f"{start}{self.feature_token * _count_tokens(self.canvas, clip)}{end}"
        return "".join(f"<{second:.1f} seconds>{grid}" for second in self._read_seconds(clip))

    def count_features(self, clip: Clip) -> int:
        return self.canvas.count_grids(len(clip.frames)) * _count_tokens(self.canvas, clip)

    def _read_seconds(self, clip: Clip) -> list[float]:
        """Return what second each grid shows: half-way from its first frame to its last."""
        step = self.canvas.step
        frames = [*clip.frames, *[clip.frames[-1]] * (-len(clip.frames) % step)]
        seconds = [each / clip.rate for each in frames]
        pairs = zip(seconds[::step], seconds[step - 1 :: step], strict=True)
        return [(first + last) / 2 for first, last in pairs]


@dataclass(frozen=True)
class GlmVideoLayout(Unmarked):
    """Each grid as an image, with the second of its first frame behind it: GLM-4.1V to 4.6V."""

    canvas: PatchCanvas
    tenths: bool  # seconds have them, and a name; else they are whole numbers, cut off
    placeholder: str = "<|video|>"
    feature_token: str = "<|image|>"
    around: tuple[str, str] = ("<|begin_of_video|>", "<|end_of_video|>")

    def expand(self, clip: Clip) -> str:
        tokens = self.feature_token * _count_tokens(self.canvas, clip)
        firsts = clip.frames[:: self.canvas.step]
        grid = f"<|begin_of_image|>{tokens}<|end_of_image|>"
        seconds = (frame / clip.rate for frame in firsts)
        tokenizer_config = (
            f"{each:.1f} seconds" if self.tenths else str(int(each)) for each in seconds
        )
        return "".join(grid + each for each in tokenizer_config)

    def count_features(self, clip: Clip) -> int:
        return self.canvas.count_grids(len(clip.frames)) * _count_tokens(self.canvas, clip)


@dataclass(frozen=True)
class FramesLayout(Unmarked, ABC):
    """Each frame as an image is written."""

    frame: str  # the text of one
    features: int  # of one
    placeholder: str
    feature_token: str
    around: tuple[str, str] = ("", "")

    @abstractmethod
    def expand(self, clip: Clip) -> str: ...

    def count_features(self, clip: Clip) -> int:
        return self.features * len(clip.frames)


class SmolLayout(FramesLayout):
    """Behind an introduction, and each frame behind its moment: SmolVLM."""

    def expand(self, clip: Clip) -> str:
        count = spell_number(len(clip.frames))
        length = timedelta(seconds=int(clip.total / clip.rate))
        begin = f"You are provided the following series of {count} frames from a {length} "
        moments = (divmod(int(frame / clip.rate), 60) for frame in clip.frames)
        tokenizer_config = (
            f"\nFrame from {minute:02d}:{second:02d}:" for minute, second in moments
        )
        frames = "".join(each + self.frame for each in tokenizer_config)
        return f"{begin}[H:MM:SS] video.\n{frames}\n\n"


class InternLayout(FramesLayout):
    """Numbered frames, a line for each: InternVL."""

    def expand(self, clip: Clip) -> str:
        return "\n".join(f"Frame{i + 1}: {self.frame}" for i in range(len(clip.frames)))


def _count_tokens(canvas: PatchCanvas, clip: Clip) -> int:
    """Return the tokens of each grid of frames; raises ValidationError."""
    try:
        rows, columns = canvas.fit(len(clip.frames), clip.height, clip.width)
    except ValueError as error:
        raise ValidationError(f"invalid video: {error}") from error
    return rows * columns


def lay_out_whole(canvas: PatchCanvas, settings: ImageSettings) -> WholeLayout:
    """Return the layout of a model. Raises ModelLoadError."""
    config = settings.config
    positions = read_positions(str(config.get("model_type")), config)
    if isinstance(canvas, Qwen25OmniCanvas) and positions != canvas.POSITIONS:
        raise ModelLoadError(
            f"config.json says position_id_per_seconds {positions}; served is {canvas.POSITIONS}, "
            "of all such models"
        )
    return WholeLayout(canvas, positions)


def lay_out_qwen2_5_omni_video(canvas: PatchCanvas, settings: ImageSettings) -> WholeLayout:
    """Return the layout of a model. Raises ModelLoadError."""
    layout = lay_out_whole(canvas, settings)
    return replace(layout, placeholder="<|VIDEO|>", feature_token="<|VIDEO|>", around=OMNI_MARKS)


def lay_out_timed(canvas: PatchCanvas, settings: ImageSettings) -> TimedLayout:
    """Return the layout of a model."""
    return TimedLayout(canvas)


def lay_out_glm4v(canvas: PatchCanvas, settings: ImageSettings) -> GlmVideoLayout:
    """Return the layout of a model."""
    return GlmVideoLayout(canvas, tenths=False)


def lay_out_glm46v(canvas: PatchCanvas, settings: ImageSettings) -> GlmVideoLayout:
    """Return the layout of a model."""
    return GlmVideoLayout(canvas, tenths=True)


def lay_out_smolvlm(canvas: object, settings: ImageSettings) -> SmolLayout:
    """Return the layout of a model. Raises ModelLoadError."""
    image = lay_out_idefics3(settings)
    return SmolLayout(image.write_whole(), image.features, "<video>", image.feature_token)


def lay_out_internvl_video(canvas: object, settings: ImageSettings) -> InternLayout:
    """Return the layout of a model. Raises ModelLoadError."""
    image = lay_out_internvl(settings)
    frame = f"{image.begin}{image.feature_token * image.features}{image.end}"
    return InternLayout(frame, image.features, "<video>", image.feature_token)


# Each for canvases of the kind that a family's row has with it.
VIDEO_LAYOUTS: Final[dict[str, Callable[[Any, ImageSettings], OtherLayout]]] = {
    "glm46v": lay_out_glm46v,
    "glm4v": lay_out_glm4v,
    "internvl": lay_out_internvl_video,
    "qwen2_5_omni": lay_out_qwen2_5_omni_video,
    "smolvlm": lay_out_smolvlm,
    "timed": lay_out_timed,
    "whole": lay_out_whole,
}
