"""Images and sounds that requests show, and what a server makes of them: arena, store, queue.

Everything but the decoding is the server's own. A decoding takes so many turns and no processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
import trio.testing

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.audio_models import EXTRACTOR
from tests.shard.media.audio_models import FAMILIES as HEARING
from tests.shard.media.pictures import Picture, picture
from tgi_trio.ipc.images import ImageArena, bundle_bytes, write_bundle
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.router.media.layouts.layout import ImageSize, Size
from tgi_trio.router.media.pixel_options import PixelOptions
from tgi_trio.router.media.pixel_store import PixelStore
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.media.spool import Compressed
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.media.features import Bundle, ImageEncoder

_SIZE: Final = ImageSize(1, 1)  # which nothing here asks for
_SHORTEST_S, _LONGER_S = 0.12, 0.08  # of sounds
_WORKERS = 2  # images that are decoded at a time
Count = Callable[[Bundle], int]


class Gallery:
    """What a family is shown, by number."""

    def __init__(self, family: str, count: Count | None = None) -> None:
        """`count`: of the features of a sound, where it hears."""
        self._family, self._count = family, count
        self._made: dict[int, Picture] = {}

    def __getitem__(self, number: int) -> Picture:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def place(self, number: int, first: int) -> PromptImage:
        """Return an image that begins at the place `first` of a prompt."""
        shown = self[number]
        (begin, _), *_, (last, count) = (shown.runs[0], *shown.runs)
        return PromptImage(
            first + begin,
            last + count - begin,
            tuple((offset - begin, size) for offset, size in shown.runs),
            _SIZE,
            shown.key,
            b"%d" % number,
            bundle_bytes(shown.bundle),
            PixelOptions(kind="audio") if self._count is not None else PixelOptions(),
        )

    def _make(self, number: int) -> Picture:
        if self._count is None:
            return picture(self._family, number)
        seconds = _SHORTEST_S + _LONGER_S * (number % 3)
        samples = as_floats(make_samples(seconds, seed=number))
        bundle = dict(FeatureExtractor("whisper", EXTRACTOR).extract(samples))
        return Picture(bundle, self._count(bundle))


@dataclass(frozen=True)
class Seeing:
    """What sees, or hears, in a server: loaded once."""

    gallery: Gallery
    encoder: ImageEncoder
    rules: ImageRules

    @classmethod
    def of(cls, family: str, encoder: ImageEncoder, rules: ImageRules) -> Seeing:
        """Return what sees the images of a family, or hears its sounds."""
        hears = family in HEARING
        count = (lambda bundle: len(encoder.encode(bundle).rows)) if hears else None
        return cls(Gallery(family, count), encoder, rules)


class Studio:
    """The arena of one house, and the store that decodes into it."""

    def __init__(self, seeing: Seeing, nbytes: int, features: int, turns: int) -> None:
        """`nbytes`: of the arena; `features`: bytes that are kept; `turns`: of a decoding."""
        self._seeing, self._features, self._turns = seeing, features, turns
        self._arena = ImageArena.create(nbytes)
        self._turned = trio.Event()
        self.store = PixelStore(self._arena, self._decode, _WORKERS)

    def queue(self) -> ImageQueue:
        """Return the queue of a new shard."""
        seeing = self._seeing
        return ImageQueue(seeing.encoder, self._arena, self._features, seeing.rules)

    async def turn(self) -> None:
        """Let decodings go on by a turn."""
        self._turned.set()
        self._turned = trio.Event()
        await trio.testing.wait_all_tasks_blocked()

    def close(self) -> None:
        """End it; raises RuntimeError if somebody still has an image pinned."""
        self.store.check()
        if any(kept.pins for kept in self.store._kept.values()):
            raise RuntimeError("an image is pinned that nobody sees")
        self._arena.close()

    @asynccontextmanager
    async def _decode(
        self, data: Compressed, pixel_options: PixelOptions
    ) -> AsyncIterator[_Decoded]:
        assert isinstance(data, bytes)
        for _ in range(self._turns):
            await self._turned.wait()
        yield _Decoded(self._seeing.gallery[int(data)].bundle)


@dataclass(frozen=True)
class _Decoded:
    """See `pixel_store.Decoded`."""

    bundle: Bundle
    size: Size = _SIZE

    @property
    def nbytes(self) -> int:
        return bundle_bytes(self.bundle)

    async def copy_to(self, memory: memoryview) -> None:
        write_bundle(memory, self.bundle)
