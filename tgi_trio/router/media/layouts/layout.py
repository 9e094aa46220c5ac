"""The tokens of an image in a prompt, from its size and the model's settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.media.video_canvas import Clip

Settings = Mapping[str, Any]

_MOST: Final = 2**31
# What counts the tokens of an image or a tile: its text is made of as many.
_FEATURES: Final = (
    *("image_seq_length", "image_seq_len", "num_image_tokens", "mm_tokens_per_image"),
    *("audio_seq_length", "audio_soft_tokens_per_image"),
)
_MOST_FEATURES: Final = 2**16


class ImageSize(NamedTuple):
    """Size of an image in pixels, after the rotation in its EXIF data."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width


# What is known of an image, a video or a sound before its tokens are counted.
Size = ImageSize | Clip | Sound


class Layout(Protocol):
    """What the layouts of images and of all else have in common.

    How the token for one (`transformers`' *placeholder*) is expanded.
    """

    @property
    def placeholder(self) -> str:
        """The token for one in the chat template's text."""

    @property
    def feature_token(self) -> str:
        """The token in whose places features of a tower replace embeddings."""

    @property
    def mark_tokens(self) -> tuple[str, ...]:
        """Tokens of `expand` beside that one in whose places features stand as well."""

    @property
    def around(self) -> tuple[str, str]:
        """Texts before and after the placeholder that chat templates write, not `expand`."""

    @property
    def line_end(self) -> str:
        """Text behind the placeholder in a message for a template that takes texts alone."""

    @property
    def apart(self) -> str:
        """Text between the placeholder and what is beside it in such a message."""


class ImageLayout(Layout, Protocol):
    """One family's layout of images."""

    @property
    def processor_options(self) -> Mapping[str, Any]:
        """Options that the family's processor passes to its image processor with each image."""

    @property
    def placeholder_is_text(self) -> bool:
        """Whether the placeholder is no token, but text that templates write."""

    @property
    def writes_bos(self) -> bool:
        """Whether `finish` writes the BOS token, so that nothing else must."""

    def among(self, count: int) -> ImageLayout:
        """Return the layout of each image of a prompt that has so many: this one, unless they are
        seen otherwise there.
        """

    def number(self, index: int) -> str:
        """Return the text before an image that tells it from the prompt's others.

        `index`: of images before it.
        """

    def expand(self, size: ImageSize) -> str:
        """Return the text that replaces the placeholder, with a token for each feature.

        Raises ValidationError if the family cannot take an image of this size.
        """

    def count_features(self, size: ImageSize) -> int:
        """Return the number of feature and mark tokens in `expand`. Raises as that does."""

    def finish(self, text: str, bos: str) -> str:
        """Return a prompt with expanded placeholders as the tokenizer gets it.

        `bos`: the tokenizer's BOS token, for a family that writes it into the text.
        """


class OtherLayout(Layout, Protocol):
    """One family's layout of what is no image, by what is known of it."""

    @property
    def minds_images(self) -> bool:
        """Whether a tower makes other features of it where its prompt has images as well."""

    def expand(self, size: Any) -> str:
        """Return the text that replaces the placeholder, with a token for each feature.

        `size`: of the kind that its decoder answers. Raises ValidationError if the family cannot
        take such a one.
        """

    def count_features(self, size: Any) -> int:
        """Return the number of feature and mark tokens in `expand`. Raises as that does."""


class Unmarked:
    """For layouts whose features stand for one token alone."""

    mark_tokens: tuple[str, ...] = ()
    line_end = "\n"
    apart = ""
    minds_images = False


class PlainFinish:
    """For families that change nothing but the placeholders, each by itself."""

    mark_tokens: tuple[str, ...] = ()
    line_end = "\n"
    apart = ""
    around = ("", "")
    placeholder_is_text = False
    writes_bos = False

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {}

    def among(self: ImageLayout, count: int) -> ImageLayout:
        return self

    def number(self, index: int) -> str:
        return ""

    def finish(self, text: str, bos: str) -> str:
        return text


@dataclass(frozen=True)
class ImageSettings:
    """A model's settings for images; a mapping is empty if its file is missing."""

    config: Settings  # config.json
    # preprocessor_config.json, or `image_processor` in processor_config.json (transformers 5).
    image_processor: Settings = field(default_factory=dict)
    processor: Settings = field(default_factory=dict)  # processor_config.json
    tokenizer_config: Settings = field(default_factory=dict)  # tokenizer_config.json

    @property
    def vision(self) -> Settings:
        """The vision tower's configuration."""
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}

    def size(self, key: str, default: Settings) -> Settings:
        """Return one of the image processor's sizes as a mapping.

        A single number is a shortest edge, as in older files.
        """
        found = self.image_processor.get(key)
        if found is None:
            return default
        return found if isinstance(found, Mapping) else {"shortest_edge": found}


def find_token(tokenizer_config: Settings, name: str, number: int | None = None) -> str | None:
    """Return a token of tokenizer_config.json by what it is for, or by its id if it has no name."""
    found: dict[str, Any] = {}
    more = [
        tokenizer_config.get(kind)
        for kind in ("model_specific_special_tokens", "extra_special_tokens")
    ]
    for each in (*more, tokenizer_config):
        found |= each if isinstance(each, Mapping) else {}
    given = found.get(name)
    if given is None and number is not None:
        added = tokenizer_config.get("added_tokens_decoder")
        given = added.get(str(number)) if isinstance(added, Mapping) else None
    given = given.get("content") if isinstance(given, Mapping) else given
    return given if isinstance(given, str) and given else None


def read_int(settings: Settings, key: str, default: int | None = None) -> int:
    """Return a positive number from settings. Raises ModelLoadError with its name."""
    found = settings.get(key)
    if found is None:
        found = default
    most = _MOST_FEATURES if key in _FEATURES else _MOST
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found < most:
        return found
    raise ModelLoadError(
        f"the image settings need {key}, a positive number below {most}, not {found!r}"
    )
