"""Everything that serves a model's images and videos: decoders, pixel store and reader."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from tgi_trio.router.images.decoder import DecodedImage, DecodingBounds, ImageDecoder
from tgi_trio.router.images.fetch import FetchLimits, ImageFetcher
from tgi_trio.router.images.image_model import ImageModel
from tgi_trio.router.images.image_reader import (
    Counts,
    Fetch,
    ImageLimits,
    ImageReader,
    OtherReading,
    Tokens,
)
from tgi_trio.router.images.kinds import WORDS, Kind
from tgi_trio.router.images.manner import Manner
from tgi_trio.router.images.pixel_store import Arena, PixelStore
from tgi_trio.router.images.policy import parse_policy
from tgi_trio.router.images.spool import Compressed, Spool


@dataclass(frozen=True, slots=True)
class ImageFlags:
    """The operator's limits; each field is named after its flag."""

    image_urls: str = "public"
    max_image_fetch_size: int = 20 * 2**20  # bytes
    max_image_pixels: int = 20_000_000
    max_images_per_prompt: int = 8
    max_image_bytes: int = 128 * 2**20
    max_video_frames: int = 768
    max_video_pixels: int = 4_000_000_000  # of all frames
    max_audio_seconds: float = 600.0


class ImageService:
    """Serves the images of one model, for as long as the server runs."""

    def __init__(
        self,
        model: ImageModel,
        flags: ImageFlags,
        arena: Arena,
        tokens: Tokens,
        counts: Counts,
        workers: int,
        fetcher: Fetch | None = None,
    ) -> None:
        """`workers`: images that are decoded at the same time.

        Raises ConfigurationError for `image_urls`, ModelLoadError for a tokenizer without the image
        tokens.
        """
        settings = model.decoder_settings(flags.max_image_pixels)
        self._spool = Spool()
        self._decoder = ImageDecoder(settings, workers, self._spool, flags.max_image_fetch_size)
        self._others: dict[Kind, ImageDecoder] = {}
        readings: dict[Kind, OtherReading] = {}
        unserved = dict(model.unserved)
        bounds = DecodingBounds(
            flags.max_image_pixels,
            flags.max_video_frames,
            flags.max_video_pixels,
            flags.max_audio_seconds,
            arena.nbytes,
        )
        for kind, other in model.others.items():
            needed = (other.layout.feature_token, *other.layout.mark_tokens)
            if missing := [token for token in needed if token not in tokens.added_tokens]:
                several = WORDS[kind].several
                unserved[kind] = (
                    f"the tokenizer has no token {missing[0]!r}, which this model's {several} need"
                )
                continue
            shown = other.decoder_settings(bounds)
            decoder = ImageDecoder(shown, workers, self._spool, flags.max_image_fetch_size)
            self._others[kind] = decoder
            readings[kind] = OtherReading(other.layout, decoder, shown.dump())
        self.store = PixelStore(arena, self._decode, workers)
        if fetcher is None:
            limits = FetchLimits(flags.max_image_fetch_size)
            fetcher = ImageFetcher(parse_policy(flags.image_urls), limits)
        self.reader = ImageReader(
            model.layout,
            tokens,
            fetcher,
            self.store,
            self._spool,
            self._decoder,
            counts,
            ImageLimits(
                flags.max_images_per_prompt, flags.max_image_fetch_size, flags.max_image_bytes
            ),
            processed_as=settings.dump(),
            readings=readings,
            unserved=unserved,
        )

    def _decode(
        self, data: Compressed, manner: Manner
    ) -> AbstractAsyncContextManager[DecodedImage]:
        """Do what `ImageDecoder.decode` does, in processes of its kind."""
        return self._others.get(manner.kind, self._decoder).decode(data, manner)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once images can be decoded. Raises ModelLoadError."""
        try:
            await self._decoder.start()
            task_status.started()
            await self.store.run()
        finally:
            await self._decoder.close()
            for other in self._others.values():
                await other.close()
            self._spool.close()
