"""Media in the keys of the prefix cache, and the parts of a prompt that one step must compute.

Two images of the same size have the same placeholder token ids but different K and V. So in keys an
image's feature tokens are replaced by a negative number that its content gets at first sight.
Unlike hashes, numbers cannot collide.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

import numpy as np

from tgi_trio.model.image_families import ImageAttention
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling.sequence import Sequence

_KEPT: Final = 1 << 14  # images whose numbers are remembered; a forgotten one gets a new number
_NUMBERS: Final = 1 << 31  # negative int32


class ImagePrefixes:
    """Assigns numbers to images by content."""

    def __init__(self, image_attention: ImageAttention) -> None:
        """`image_attention`: which tokens of the model's prompts attend in both directions."""
        self._image_attention = image_attention
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._next = 0
        self._laps = 0  # how often all numbers have been used up

    def enter(self, sequence: Sequence) -> None:
        """Set a new sequence's `image_numbers`, `salt` and `uncut`."""
        request = sequence.request
        sequence.image_numbers = tuple(self._number(image.key) for image in request.images)
        sequence.uncut = count_uncut(request, self._image_attention)
        if request.images and self._laps:
            sequence.salt = f"{self._laps} {sequence.salt}"
        if self._image_attention == "prompt":  # K and V of a token depend on the whole prompt
            kind = f"image {_digest(sequence)}" if request.images else "text"
            sequence.salt = f"{kind} {sequence.salt}"
        # they depend on all images of the prompt, later ones too
        elif self._image_attention == "layers":
            kind = f"image {_digest_images(sequence)}" if request.images else "text"
            sequence.salt = f"{kind} {sequence.salt}"

    def _number(self, content: bytes) -> int:
        number = self._numbers.get(content)
        if number is None:
            if self._next == _NUMBERS:
                self._numbers.clear()
                self._next, self._laps = 0, self._laps + 1
            number = self._numbers[content] = self._next
            self._next += 1
            if len(self._numbers) > _KEPT:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(content)
        return number


def count_uncut(request: Request, image_attention: ImageAttention) -> int:
    """Return the longest run of prompt tokens that has to be in one step; 0 if there is none."""
    if image_attention in ("causal", "layers") or not request.images:
        return 0
    if image_attention == "prompt":
        return len(request.prompt_ids)
    seen = [image for image in request.images if image.pixel_options.kind != "audio"]
    return max((count for image in seen for _, count in image.feature_places), default=0)


def _digest(sequence: Sequence) -> str:
    """Return a digest of a prompt and its images."""
    ids = np.ascontiguousarray(sequence.request.prompt_ids, np.int32).tobytes()
    return hashlib.sha256(ids + _digest_images(sequence).encode()).hexdigest()


def _digest_images(sequence: Sequence) -> str:
    """Return a digest of a prompt's images and their places."""
    found = hashlib.sha256()
    for image in sequence.request.images:
        found.update(f" {image.first} {image.feature_places} ".encode() + image.key)
    return found.hexdigest()
