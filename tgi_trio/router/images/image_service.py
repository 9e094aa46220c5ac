"""Everything that serves a model's images and videos: decoders, pixel store and reader."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from tgi_trio.router.images.decoder import DecodedImage, ImageDecoder
from tgi_trio.router.images.fetch import FetchLimits, ImageFetcher
from tgi_trio.router.images.image_model import ImageModel
from tgi_trio.router.images.image_reader import (
    Counts,
    Fetch,
    ImageLimits,
    ImageReader,
    Tokens,
    VideoReading,
)
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
        self._videos: ImageDecoder | None = None
        reading: VideoReading | None = None
        unserved = model.unserved_videos
        if (
            model.videos is not None
            and model.videos.layout.feature_token not in tokens.added_tokens
        ):
            token = model.videos.layout.feature_token
            unserved = f"the tokenizer has no token {token!r}, which this model's videos need"
        elif model.videos is not None:
            shown = model.videos.decoder_settings(
                flags.max_image_pixels, flags.max_video_frames, flags.max_video_pixels, arena.nbytes
            )
            self._videos = ImageDecoder(shown, workers, self._spool, flags.max_image_fetch_size)
            reading = VideoReading(model.videos.layout, self._videos, shown.dump())
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
            videos=reading,
            unserved_videos=unserved,
        )

    def _decode(
        self, data: Compressed, manner: Manner
    ) -> AbstractAsyncContextManager[DecodedImage]:
        """Do what `ImageDecoder.decode` does, in processes of its kind."""
        if manner.video and self._videos is not None:
            return self._videos.decode(data, manner)
        return self._decoder.decode(data, manner)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once images can be decoded. Raises ModelLoadError."""
        try:
            await self._decoder.start()
            task_status.started()
            await self.store.run()
        finally:
            await self._decoder.close()
            if self._videos is not None:
                await self._videos.close()
            self._spool.close()
