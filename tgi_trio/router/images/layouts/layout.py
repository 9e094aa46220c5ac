"""What an image becomes among a prompt's tokens, from its size and the model's settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tgi_trio.errors import ModelLoadError

Settings = Mapping[str, Any]


class ImageSize(NamedTuple):
    """Pixels of an image as it is seen: after the rotation that its EXIF data asks for."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width


class ImageLayout(Protocol):
    """One family's way: what `transformers` calls expanding the image token (a *placeholder*)."""

    @property
    def placeholder(self) -> str:
        """The token that stands for an image in the chat template's text."""

    @property
    def feature_token(self) -> str:
        """The token at whose places the tower's features stand instead of an embedding."""

    @property
    def around(self) -> tuple[str, str]:
        """What a chat template writes around the placeholder, and `expand` does not."""

    @property
    def processor_options(self) -> Mapping[str, Any]:
        """What the family's processor hands to its image processor with each image."""

    @property
    def writes_bos(self) -> bool:
        """Whether `finish` writes the tokenizer's first token, so that nobody else must."""

    def expand(self, size: ImageSize) -> str:
        """Return the text that takes the placeholder's place, a feature token for each feature.

        Raises ValidationError where the family cannot take an image of this size.
        """

    def count_features(self, size: ImageSize) -> int:
        """Return how many feature tokens `expand` writes; raises likewise."""

    def finish(self, text: str, bos: str) -> str:
        """Return a prompt whose placeholders are expanded as the tokenizer is to read it.

        `bos`: the tokenizer's first token, for a family that writes it into the text.
        """


class PlainFinish:
    """For families that change nothing but the placeholders."""

    around = ("", "")
    writes_bos = False

    @property
    def processor_options(self) -> Mapping[str, Any]:
        return {}

    def finish(self, text: str, bos: str) -> str:
        return text


@dataclass(frozen=True)
class ImageSettings:
    """What a model's folder says of images; each mapping is empty where its file is not there."""

    config: Settings  # config.json
    # preprocessor_config.json, or `image_processor` in processor_config.json (transformers 5).
    image_processor: Settings = field(default_factory=dict)
    processor: Settings = field(default_factory=dict)  # processor_config.json

    @property
    def vision(self) -> Settings:
        """The tower's numbers."""
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}

    def size(self, key: str, default: Settings) -> Settings:
        """Return one of the image processor's sizes, as words and numbers.

        A lone number is a shortest edge, as older files have it.
        """
        found = self.image_processor.get(key)
        if found is None:
            return default
        return found if isinstance(found, Mapping) else {"shortest_edge": found}


def read_int(settings: Settings, key: str, default: int | None = None) -> int:
    """Return a positive number of a settings file; raises ModelLoadError with its name."""
    found = settings.get(key)
    if found is None:
        found = default
    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
        return found
    raise ModelLoadError(f"the image settings need {key}, a positive number, not {found!r}")
