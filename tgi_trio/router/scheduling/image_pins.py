"""Pins what sequences' media hold in shared memory while the shard may read them.

A sequence is sent to the shard with the places of all its images. An image is unpinned when a step
reports that its pixels are no longer needed, the rest when the shard has dropped the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling.sequence import Sequence


class Pixels(Protocol):
    """A store of pixels in an arena (`images.pixel_store.PixelStore`)."""

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        """Return the pixels' place, which stays valid until `unpin`; None if not decoded yet."""
        ...

    def unpin(self, image: PromptImage) -> None: ...


class PixelSource(Pixels, Protocol):
    """A store of pixels that decodes an image again if it is to be pinned and was dropped."""

    def on_ready(self, callback: Callable[[bytes], None]) -> None:
        """Have `callback` called with the key of each image whose pixels are ready."""
        ...

    def on_lost(self, callback: Callable[[bytes, str], None]) -> None:
        """Have `callback` called with the key of each image that cannot be decoded, and why."""
        ...


class ImagePins:
    """Which images of which sequences are pinned."""

    def __init__(self) -> None:
        self._pixels: Pixels | None = None  # None: no request has images

    def use(self, pixels: Pixels) -> None:
        """Pin images in `pixels` from now on."""
        self._pixels = pixels

    def check(self, request: Request) -> None:
        """Raise ValueError for a request with images if there is no store of pixels."""
        if request.images and self._pixels is None:
            raise ValueError("a request has images, and nothing keeps their pixels")

    def pin(self, sequence: Sequence) -> bool:
        """Pin all images of a sequence, or none; False if some are not decoded yet."""
        images = sequence.request.images
        if not images or self._pixels is None:
            return not images
        found = [self._pixels.pin(image) for image in images]
        there = {which: place for which, place in enumerate(found) if place is not None}
        if len(there) == len(images):
            sequence.places = there
            return True
        for which in there:
            self._pixels.unpin(images[which])
        return False

    def take_in(self, step: StepReport, living: dict[int, Sequence]) -> None:
        """Unpin the images whose pixels a step has reported as no longer needed."""
        for id, which in zip(step.seen_sequence, step.seen_image, strict=True):
            sequence = living.get(id)
            if sequence is not None and sequence.places.pop(which, None) is not None:
                self._unpin(sequence, which)

    def release(self, sequence: Sequence) -> None:
        """Unpin all images of a sequence that the shard has dropped."""
        places, sequence.places = sequence.places, {}
        for which in places:
            self._unpin(sequence, which)

    def _unpin(self, sequence: Sequence, which: int) -> None:
        if self._pixels is not None:
            self._pixels.unpin(sequence.request.images[which])
