"""What a model's folder says about images, videos and sounds: whether it takes any, and how."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.media.video_canvases import CANVASES
from tgi_trio.model.audio_families import AUDIO_FAMILIES, is_audio_only
from tgi_trio.model.config import NONSENSE, read_json, read_values
from tgi_trio.model.image_families import find_family, has_vision
from tgi_trio.model.processor_files import read_image_processor
from tgi_trio.model.published import find_pictures
from tgi_trio.model.video_families import VIDEO_FAMILIES, find_video_family
from tgi_trio.router.media.audio_model import AudioModel, find_audio_model
from tgi_trio.router.media.decoder import (
    DecoderSettings,
    DecodingBounds,
    VideoDecoderSettings,
)
from tgi_trio.router.media.kinds import WORDS, Kind
from tgi_trio.router.media.layouts.layout import (
    ImageLayout,
    ImageSettings,
    ImageSize,
    OtherLayout,
)
from tgi_trio.router.media.layouts.table import LAYOUTS
from tgi_trio.router.media.layouts.videos import VIDEO_LAYOUTS

_SHAPES: Final = (1.0, 4 / 3, 3 / 4, 2.0, 1 / 2)  # width over height
_SIZES: Final = tuple(ImageSize(*pair) for pair in ((1, 1), (64, 64), (480, 640), (4096, 32)))
_NO_BOUND: Final = 2**31  # of frames: how many are seen is for who decodes them
_STEP: Final = 16  # each try has 1 / 16 fewer pixels than the one before
# Keys of an image processor's settings that do not affect pixels.
_NAMES: Final = (
    *("image_processor_type", "video_processor_type", "processor_class"),
    *("feature_extractor_type", "auto_map"),
)


# What the shard makes of pixels by the image processor's settings, and has to for videos.
_NORMALISING: Final = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


@dataclass(frozen=True, slots=True)
class VideoModel:
    """How one model takes videos."""

    canvas: str  # a key of `media.video_canvases.CANVASES`
    layout: OtherLayout
    processor: Mapping[str, Any]  # settings of its video processor

    def decoder_settings(self, bounds: DecodingBounds) -> VideoDecoderSettings:
        """Return how its videos are decoded."""
        most = bounds.max_image_pixels, bounds.max_video_frames, bounds.max_video_pixels
        return VideoDecoderSettings(self.canvas, self.processor, {}, *most, bounds.nbytes)


class OtherModel(Protocol):
    """How one model takes what is no image."""

    @property
    def layout(self) -> OtherLayout: ...
    def decoder_settings(self, bounds: DecodingBounds) -> DecoderSettings: ...


@dataclass(frozen=True, slots=True)
class MediaModel:
    """How one model takes images, and what else it takes."""

    family: str  # a key of `media.processors.PROCESSORS`
    layout: ImageLayout | None  # None: it does not see, and takes only others
    processor: Mapping[str, Any]  # settings of its image processor
    needs: tuple[str, ...] = ()  # as in `ImageFamily`
    others: Mapping[Kind, OtherModel] = field(default_factory=dict)  # what else it takes
    unserved: Mapping[Kind, str] = field(default_factory=dict)  # why it takes no others
    lacking: tuple[Kind, ...] = ()  # of those, what its family takes
    # Folders of adapters of the model's own, by what a prompt has to hold; the first counts.
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def decoder_settings(self, max_pixels: int) -> DecoderSettings:
        """Return how its images are decoded; of a model that sees."""
        options = {} if self.layout is None else self.layout.processor_options
        return DecoderSettings(self.family, self.processor, options, max_pixels)

    def without(self, kind: Kind, why: str) -> MediaModel:
        """Return a model that takes none of a kind which its family takes."""
        others = {each: model for each, model in self.others.items() if each != kind}
        unserved = {**self.unserved, kind: why}
        return replace(self, others=others, unserved=unserved, lacking=(*self.lacking, kind))

    def describe_longest(self, max_seconds: float) -> str:
        """Return the longest sound that may come, as JSON for a shard; "": none is heard."""
        audio = self.others.get("audio")
        return audio.describe_longest(max_seconds) if isinstance(audio, AudioModel) else ""

    def describe_largest(self, max_pixels: int, max_tokens: int) -> str:
        """Return the largest allowed image and its decoder settings, as JSON; "": none allowed."""
        if self.layout is None:
            return ""
        size = find_largest(self.layout, max_pixels, max_tokens)
        if size is None:
            return ""
        made = json.loads(self.decoder_settings(max_pixels).dump())
        return json.dumps(made | {"height": size.height, "width": size.width})


def find_largest(layout: ImageLayout, max_pixels: int, max_tokens: int) -> ImageSize | None:
    """Return the size of an image with about as many tokens as any; None if none is allowed.

    An image becomes a grid of tiles or patches by its shape, so common shapes are tried.
    """
    best, most = None, 0
    for shape in _SHAPES:
        pixels = max_pixels
        while pixels > 0:
            height = max(1, math.isqrt(int(pixels / shape)))
            size = ImageSize(height, max(1, pixels // height))
            try:
                tokens = layout.count_features(size)
            except ValidationError:
                break
            if tokens <= max_tokens:
                best, most = (size, tokens) if tokens > most else (best, most)
                break
            pixels -= max(1, pixels // _STEP)
    return best


def read_image_settings(folder: Path) -> ImageSettings:
    """Return the image settings in a folder's files. Raises ModelLoadError."""
    processor = read_json(folder / "processor_config.json") or {}
    image_processor = read_image_processor(folder) or {}
    told = read_json(folder / "tokenizer_config.json") or {}
    values = read_values(folder) or {}
    if (pictures := find_pictures(values)) is not None:
        image_processor, processor = map(dict, pictures)
    return ImageSettings(values, image_processor, processor, told)


def find_media_model(folder: Path) -> MediaModel | None:
    """Return how the model in a folder takes images and others, None if it takes none.

    Raises ModelLoadError if its images are not served, or its settings cannot be used; of a model
    that does not see, if it takes nothing else.
    """
    settings = read_image_settings(folder)
    if is_audio_only(settings.config):
        with _refusing(WORDS["audio"].several):
            heard = find_audio_model(folder, settings)
        return MediaModel("", None, {}, others={"audio": heard})
    if not has_vision(settings.config):
        return None
    family = find_family(settings.config)
    layout = lay_out_images(settings, family.layout)
    if not settings.image_processor:
        raise ModelLoadError(
            f"{folder} has no preprocessor_config.json, which says how images are processed"
        )
    kept = {name: value for name, value in settings.image_processor.items() if name not in _NAMES}
    others: dict[Kind, OtherModel] = {}
    unserved: dict[Kind, str] = {}
    for kind, (find, _) in _OTHERS.items():
        try:
            with _refusing(WORDS[kind].several):
                others[kind] = find(folder, settings)
        except ModelLoadError as error:
            unserved[kind] = str(error)
    model_type = settings.config.get("model_type")
    lacking = tuple(kind for kind in unserved if model_type in _OTHERS[kind][1])
    return MediaModel(family.processor, layout, kept, family.needs, others, unserved, lacking)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what is raised over values of the wrong kind in settings into a ModelLoadError."""
    try:
        yield
    except NONSENSE as error:
        raise ModelLoadError(f"the settings of its {what} make no sense: {error}") from error


def lay_out_images(settings: ImageSettings, name: str) -> ImageLayout:
    """Return the layout of a model's images; `name`: a key of `LAYOUTS`.

    The tokens of some images are counted, so that nothing that the settings say fails later. Raises
    ModelLoadError for settings that make no sense.
    """
    with _refusing("images"):
        layout = LAYOUTS[name](settings)
        for size in _SIZES:
            with suppress(ValidationError):  # too small, or too narrow
                layout.count_features(size)
        return layout


def find_video_model(folder: Path, settings: ImageSettings) -> VideoModel:
    """Return how the model in a folder takes videos; `settings`: of its images.

    Raises ModelLoadError if it takes none, or its settings cannot be used.
    """
    family = find_video_family(settings.config)
    found = settings.processor.get("video_processor")
    if not isinstance(found, Mapping):
        found = read_json(folder / "video_preprocessor_config.json")
    if found is None:  # as in transformers, of files from before there was one for videos
        found = settings.image_processor
    kind = CANVASES[family.canvas]
    for name in _NORMALISING:
        ours = found.get(name, kind.DEFAULTS[name])
        if settings.image_processor.get(name, ours) != ours:
            raise ModelLoadError(
                f"the settings of its video processor have {name} {ours}, and those of images "
                f"{settings.image_processor[name]}: both have to be the same here"
            )
    kept = {name: value for name, value in found.items() if name not in _NAMES}
    canvas = kind.read(kept, _NO_BOUND)
    if find_spec("av") is None:
        raise ModelLoadError("they need PyAV, pip install 'tgi-trio[video]'")
    layout = VIDEO_LAYOUTS[family.layout](canvas, settings)
    return VideoModel(family.canvas, layout, kept)


def name_served(model: MediaModel | None) -> set[str]:
    """Return what errors call the kinds that a model takes; None: it takes none."""
    if model is None:
        return set()
    images: tuple[Kind, ...] = () if model.layout is None else ("image",)
    return {WORDS[kind].several for kind in (*images, *model.others)}


# Beside images: what finds how a model takes them, and the types of models that may.
_OTHERS: Final[
    Mapping[Kind, tuple[Callable[[Path, ImageSettings], OtherModel], Collection[str]]]
] = {
    "video": (find_video_model, VIDEO_FAMILIES),
    "audio": (find_audio_model, AUDIO_FAMILIES),
}
