"""A prompt with images and the like: as texts and links, then as one text with all their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ValidationError
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.media.layouts.layout import ImageLayout, ImageSize, OtherLayout, Size
from tgi_trio.router.media.links import MediaLink, Piece, split_text
from tgi_trio.router.media.pixel_options import PLAIN, PixelOptions
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.media.spool import Compressed


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Texts and images in order."""

    pieces: tuple[Piece, ...]

    @classmethod
    def parse(cls, text: str, around: tuple[str, str] = ("", "")) -> ImagePrompt | None:
        """Return the prompt of a text with links, None if it has no links.

        `around`: texts to add before and after each image.
        """
        found = split_text(text)
        if not any(isinstance(each, MediaLink) for each in found):
            return None
        before, after = around
        pieces: list[Piece] = []
        for piece in found:
            pieces += [before, piece, after] if isinstance(piece, MediaLink) else [piece]
        return cls(tuple(filter(None, pieces)))

    @property
    def text(self) -> str:
        """Its text without the images."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def links(self) -> list[MediaLink]:
        """Its images."""
        return [piece for piece in self.pieces if isinstance(piece, MediaLink)]

    def __len__(self) -> int:
        """Return the number of its characters, without the images."""
        return sum(len(piece) for piece in self.pieces if isinstance(piece, str))


Prompt = str | ImagePrompt  # a rendered conversation, or a client's text


@dataclass(frozen=True, slots=True)
class DecodableImage:
    """An image whose bytes are here, and which can be decoded."""

    data: Compressed
    key: bytes  # 32 bytes
    size: Size
    nbytes: int  # of its pixels
    pixel_options: PixelOptions = PLAIN


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt as its tokenizer gets it, with the owner of each feature token.

    A client's text may contain a feature token as well: its position in `owners` shows that it is
    not an image's.
    """

    text: str
    images: tuple[DecodableImage, ...]
    owners: tuple[tuple[int, int], ...]  # runs: (index of the image, -1: text; number of tokens)
    feature_ids: Mapping[str, int]  # tokens in whose places features stand
    writes_bos: bool = False  # it already has the tokenizer's BOS token

    @property
    def features(self) -> int:
        """How many feature tokens belong to images."""
        return sum(count for owner, count in self.owners if owner >= 0)

    def __len__(self) -> int:
        return len(self.text)

    def place(self, ids: NDArray[np.int32], cut_off: bool) -> tuple[PromptImage, ...]:
        """Return where the images are among the ids of the text.

        `cut_off`: `ids` are only the last ones, and images before them are left out. Raises
        ValidationError if an image is cut in two.
        """
        owners = np.repeat(*np.array(self.owners or [(-1, 0)], np.int64).T)
        places = np.flatnonzero(np.isin(ids, list(self.feature_ids.values())))
        cut = len(owners) - len(places)
        if cut < 0 or (cut and not cut_off):
            raise ValidationError(
                f"the prompt has {len(places)} tokens {' or '.join(map(repr, self.feature_ids))}, "
                f"where its images and texts have {len(owners)}: leave it out of texts"
            )
        owners = owners[cut:]
        found: list[PromptImage] = []
        for i, image in enumerate(self.images):
            wanted = sum(count for owner, count in self.owners if owner == i)
            positions = places[owners == i]
            if 0 < len(positions) < wanted:
                raise ValidationError(
                    f"`truncate` cuts image {i + 1} in two: keep its {wanted} tokens, or none"
                )
            if len(positions):
                found.append(_placed(image, positions))
        return tuple(found)


def _placed(image: DecodableImage, places: NDArray[np.int64]) -> PromptImage:
    first, last = int(places[0]), int(places[-1])
    begins = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    counts = np.diff(begins, append=len(places))
    runs = zip((places[begins] - first).tolist(), counts.tolist(), strict=True)
    return PromptImage(
        first=first,
        tokens=last + 1 - first,
        feature_places=tuple(runs),
        size=image.size,
        key=image.key,
        data=image.data,
        nbytes=image.nbytes,
        pixel_options=image.pixel_options,
    )


def expand_prompt(
    prompt: ImagePrompt,
    images: Sequence[DecodableImage],
    layout: ImageLayout | None,
    bos: str,
    feature_ids: Mapping[str, int],
    others: Mapping[Kind, OtherLayout] = MappingProxyType({}),
) -> ExpandedPrompt:
    """Return a prompt with all tokens of its images. Raises as `ImageLayout.expand` does.

    `layout`: None of a model that does not see, whose prompts have no images; `feature_ids`: ids of
    the layouts' feature and mark tokens; `others`: layouts of what is no image.
    """
    if layout is not None:
        layout = layout.among(sum(isinstance(image.size, ImageSize) for image in images))
    texts: list[str] = []
    owners: list[tuple[int, int]] = []
    seen = pictures = 0
    for piece in prompt.pieces:
        if isinstance(piece, str):
            texts.append(piece)
            owners.append((-1, sum(map(piece.count, feature_ids))))
        else:
            size = images[seen].size
            if isinstance(size, ImageSize) and layout is not None:
                texts.append(layout.number(pictures) + layout.expand(size))
                owners.append((seen, layout.count_features(size)))
                pictures += 1
            else:
                other = others[images[seen].pixel_options.kind]
                texts.append(other.expand(size))
                owners.append((seen, other.count_features(size)))
            seen += 1
    text = "".join(texts)
    found = ExpandedPrompt(text, tuple(images), tuple(owners), feature_ids)
    if layout is None:
        return found
    return replace(found, text=layout.finish(text, bos), writes_bos=layout.writes_bos)
