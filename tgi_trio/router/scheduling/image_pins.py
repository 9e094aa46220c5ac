"""Images of sequences: their pixels stay where they are while a shard may read them.

A sequence goes to the shard with the places of all its images. Each is let go when a step says that
nobody needs it, all that are left when the shard has dropped the sequence.
"""

from __future__ import annotations

from typing import Protocol

from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.images.prompt_image import PromptImage
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling.sequence import Sequence


class Pixels(Protocol):
    """What keeps pixels in places of an arena (`images.pixel_store.PixelStore`)."""

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        """Return where the pixels are, until `unpin`; None: they are not there yet."""
        ...

    def unpin(self, image: PromptImage) -> None: ...


class ImagePins:
    """Which images of which sequences are pinned."""

    def __init__(self) -> None:
        self._pixels: Pixels | None = None  # no request has any images

    def use(self, pixels: Pixels) -> None:
        """Pin images in `pixels` from now on."""
        self._pixels = pixels

    def check(self, request: Request) -> None:
        """Raise ValueError for a request with images where nothing keeps pixels."""
        if request.images and self._pixels is None:
            raise ValueError("a request has images, and nothing keeps their pixels")

    def pin(self, sequence: Sequence) -> bool:
        """Pin all images of a sequence, or none; False: some are to be decoded first."""
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
        """Let go of what a step says is not needed."""
        for id, which in zip(step.seen_sequence, step.seen_image, strict=True):
            sequence = living.get(id)
            if sequence is not None and sequence.places.pop(which, None) is not None:
                self._unpin(sequence, which)

    def release(self, sequence: Sequence) -> None:
        """The shard has dropped a sequence, or is gone: let go of all its images."""
        places, sequence.places = sequence.places, {}
        for which in places:
            self._unpin(sequence, which)

    def _unpin(self, sequence: Sequence, which: int) -> None:
        if self._pixels is not None:
            self._pixels.unpin(sequence.request.images[which])
