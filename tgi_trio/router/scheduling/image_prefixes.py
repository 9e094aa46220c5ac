"""Images in the keys of the prefix cache, and what of a prompt no step may cut.

Two images of a size have the same token ids, and their K and V are not the same. So in a key each
feature token is a negative number: the image's own, given to its content when it is first met. No
two contents ever share a number, as two hashes of them could.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

import numpy as np

from tgi_trio.model.image_families import Sight
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling.sequence import Sequence

_KEPT: Final = 1 << 14  # images whose numbers are remembered; one forgotten gets another
_NUMBERS: Final = 1 << 31  # negative int32


class ImagePrefixes:
    """Numbers of images, by content."""

    def __init__(self, sight: Sight) -> None:
        """`sight`: what of the model's prompts sees itself both ways."""
        self._sight = sight
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # least recently met first
        self._next = 0
        self._laps = 0  # how often all numbers have been given

    def enter(self, sequence: Sequence) -> None:
        """Say of a new sequence with which others it shares prefixes, and what is not to be cut."""
        request = sequence.request
        sequence.image_numbers = tuple(self._number(image.key) for image in request.images)
        sequence.uncut = count_uncut(request, self._sight)
        if request.images and self._laps:
            sequence.salt = f"{self._laps} {sequence.salt}"
        if self._sight == "prompt":  # a token's K and V depend on all of the prompt
            kind = f"image {_digest(sequence)}" if request.images else "text"
            sequence.salt = f"{kind} {sequence.salt}"
        elif self._sight == "layers":  # and on all of its images here, those behind it as well
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


def count_uncut(request: Request, sight: Sight) -> int:
    """Return the most tokens of a prompt that one step has to compute together; 0: any number."""
    if sight in ("causal", "layers") or not request.images:
        return 0
    if sight == "prompt":
        return len(request.prompt_ids)
    return max(count for image in request.images for _, count in image.feature_places)


def _digest(sequence: Sequence) -> str:
    """Return what tells a prompt and its images from all others."""
    ids = np.ascontiguousarray(sequence.request.prompt_ids, np.int32).tobytes()
    return hashlib.sha256(ids + _digest_images(sequence).encode()).hexdigest()


def _digest_images(sequence: Sequence) -> str:
    """Return what tells the images of a prompt, and their places, from all others."""
    found = hashlib.sha256()
    for image in sequence.request.images:
        found.update(f" {image.first} {image.feature_places} ".encode() + image.key)
    return found.hexdigest()
