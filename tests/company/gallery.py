"""Images and sounds that requests show, and what a server makes of them: arena, store, queue.

Everything but the decoding is the server's own. A decoding takes so many turns and no processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import trio
import trio.testing

from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.pictures import Picture, picture
from tgi_trio.ipc.images import ImageArena, bundle_bytes, write_bundle
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.media.sound import Sound
from tgi_trio.model.image_rules import ImageRules
from tgi_trio.router.media.audio_model import AudioModel
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.media.layouts.layout import ImageSize, Size
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.router.media.pixel_options import PixelOptions
from tgi_trio.router.media.pixel_store import PixelStore
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.media.spool import Compressed
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.media.features import Bundle, ImageEncoder

_SHORTEST_S, _LONGER_S = 0.12, 0.08  # of sounds
_WORKERS = 2  # images that are decoded at a time
_HEIGHT, _WIDTH = 28, 448  # pixels of an image that is cut, and not made of noise alone


Count = Callable[[Bundle], int]  # of the features of an image or a sound


class Shown(NamedTuple):
    """An image, or a sound, as a shard gets it, and what is known of it without that."""

    picture: Picture
    size: Size
    kind: Kind = "image"


class Gallery:
    """What a family is shown, by number."""

    def __init__(
        self,
        family: str,
        model: MediaModel | None = None,
        count: Count | None = None,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`model`: of a family whose sounds, or images, are made as the server makes them.

        `count`: of the features of these; `adapters`: numbers of the model's own, by what a prompt
        has to hold: the first counts.
        """
        self._family, self._model, self._count = family, model, count
        self._adapters = adapters
        self._made: dict[tuple[int, bool], Shown] = {}

    def find(self, number: int, beside: bool = False) -> Shown:
        """Return what has a number; `beside`: a sound whose prompt has images as well."""
        key = number, beside
        if key not in self._made:
            self._made[key] = self._make(number, beside)
        return self._made[key]

    def place(self, number: int, first: int, numbers: Sequence[int]) -> PromptImage:
        """Return an image that begins at the place `first` of a prompt; `numbers`: of all there."""
        beside = self.is_beside(number, numbers)
        picture, size, kind = self.find(number, beside)
        (begin, _), *_, (last, count) = (picture.runs[0], *picture.runs)
        return PromptImage(
            first + begin,
            last + count - begin,
            tuple((offset - begin, size) for offset, size in picture.runs),
            size,
            picture.key,
            b"%d" % number,
            bundle_bytes(picture.bundle),
            PixelOptions(beside=beside, kind=kind),
        )

    def choose_adapter(self, numbers: Sequence[int]) -> int:
        """Return the number of the model's own adapter for a prompt that shows these; 0: none."""
        kinds = {self.find(number).kind for number in numbers}
        return next((own for kind, own in self._adapters.items() if kind in kinds), 0)

    def is_beside(self, number: int, numbers: Sequence[int]) -> bool:
        """Whether something is heard otherwise, as there are images among `numbers`, all there."""
        found = None if self._model is None else self._model.others.get(self.find(number).kind)
        return (
            found is not None
            and found.layout.minds_images
            and any(self.find(each).kind == "image" for each in numbers)
        )

    def _make(self, number: int, beside: bool) -> Shown:
        model = self._model
        if model is None or self._count is None:
            return Shown(picture(self._family, number), ImageSize(1, 1))
        if model.layout is not None and number % 2:
            pixels = np.random.default_rng(number).integers(0, 256, (_HEIGHT, _WIDTH, 3), np.uint8)
            processor = PixelProcessor(model.family, model.processor, {})
            bundle = dict(processor.process(pixels))
            return Shown(Picture(bundle, self._count(bundle)), ImageSize(_HEIGHT, _WIDTH))
        audio = model.others["audio"]
        assert isinstance(audio, AudioModel)
        samples = as_floats(make_samples(_SHORTEST_S + _LONGER_S * (number % 3), seed=number))
        extractor = FeatureExtractor(audio.extractor, audio.processor)
        bundle = dict(extractor.extract(samples, beside))
        sound = Sound(len(samples), extractor.sampling_rate)
        return Shown(Picture(bundle, self._count(bundle)), sound, "audio")


@dataclass(frozen=True)
class Seeing:
    """What sees, or hears, in a server: loaded once."""

    gallery: Gallery
    encoder: ImageEncoder
    rules: ImageRules
    model: MediaModel | None  # where its images are made, or read over HTTP, as the server does it

    @classmethod
    def of(
        cls,
        family: str,
        encoder: ImageEncoder,
        rules: ImageRules,
        model: MediaModel | None,
        adapters: Mapping[str, int],
    ) -> Seeing:
        """Return what sees the images of a family, or hears its sounds.

        `adapters`: numbers of the model's own, by what a prompt has to hold.
        """
        count = None
        if model is not None and "audio" in model.others:
            count = lambda bundle: len(encoder.encode(bundle).rows)  # noqa: E731
        return cls(Gallery(family, model, count, adapters), encoder, rules, model)


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
        assert isinstance(data, bytes | bytearray)
        for _ in range(self._turns):
            await self._turned.wait()
        shown = self._seeing.gallery.find(int(data), pixel_options.beside)
        yield _Decoded(shown.picture.bundle, shown.size)


@dataclass(frozen=True)
class _Decoded:
    """See `pixel_store.Decoded`."""

    bundle: Bundle
    size: Size

    @property
    def nbytes(self) -> int:
        return bundle_bytes(self.bundle)

    async def copy_to(self, memory: memoryview) -> None:
        write_bundle(memory, self.bundle)
