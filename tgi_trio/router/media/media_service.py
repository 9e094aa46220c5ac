"""Everything that serves a model's images, videos and sounds: decoders, pixel store and reader."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.media.decoder import (
    DecodedImage,
    DecoderSettings,
    DecodingBounds,
    ImageDecoder,
)
from tgi_trio.router.media.fetch import FetchLimits, MediaFetcher
from tgi_trio.router.media.kinds import WORDS, Kind
from tgi_trio.router.media.layouts.layout import OtherLayout
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.router.media.media_reader import (
    Counts,
    Fetch,
    MediaLimits,
    MediaReader,
    Reading,
    Tokens,
)
from tgi_trio.router.media.pixel_options import PixelOptions
from tgi_trio.router.media.pixel_store import Arena, PixelStore
from tgi_trio.router.media.policy import parse_policy
from tgi_trio.router.media.spool import Compressed, Spool


@dataclass(frozen=True, slots=True)
class MediaFlags:
    """The operator's limits; each field is named after its flag."""

    image_urls: str = "public"
    max_image_fetch_size: int = 20 * 2**20  # bytes
    max_image_pixels: int = 20_000_000
    max_images_per_prompt: int = 8
    max_image_bytes: int = 128 * 2**20
    max_video_frames: int = 768
    max_video_pixels: int = 4_000_000_000  # of all frames
    max_audio_seconds: float = 600.0


class MediaService:
    """Serves the media of one model, for as long as the server runs."""

    def __init__(
        self,
        model: MediaModel,
        flags: MediaFlags,
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
        model = _keep_written(model, tokens)
        self._spool = Spool()
        self._decoders: dict[Kind, ImageDecoder] = {}

        def decode(settings: DecoderSettings) -> ImageDecoder:
            made = ImageDecoder(settings, workers, self._spool, flags.max_image_fetch_size)
            self._decoders[settings.kind] = made
            return made

        pictures = None
        if model.layout is not None:
            settings = model.decoder_settings(flags.max_image_pixels)
            pictures = Reading(model.layout, decode(settings), settings.dump())
        bounds = DecodingBounds(
            flags.max_image_pixels,
            flags.max_video_frames,
            flags.max_video_pixels,
            flags.max_audio_seconds,
            arena.nbytes,
        )
        readings: dict[Kind, Reading[OtherLayout]] = {}
        for kind, other in model.others.items():
            shown = other.decoder_settings(bounds)
            readings[kind] = Reading(other.layout, decode(shown), shown.dump())
        self.store = PixelStore(arena, self._decode, workers)
        if fetcher is None:
            limits = FetchLimits(flags.max_image_fetch_size)
            fetcher = MediaFetcher(parse_policy(flags.image_urls), limits)
        self.reader = MediaReader(
            pictures,
            tokens,
            fetcher,
            self.store,
            self._spool,
            counts,
            MediaLimits(
                flags.max_images_per_prompt, flags.max_image_fetch_size, flags.max_image_bytes
            ),
            readings=readings,
            unserved=model.unserved,
        )

    def _decode(
        self, data: Compressed, pixel_options: PixelOptions
    ) -> AbstractAsyncContextManager[DecodedImage]:
        """Do what `ImageDecoder.decode` does, in processes of its kind."""
        return self._decoders[pixel_options.kind].decode(data, pixel_options)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once images can be decoded. Raises ModelLoadError."""
        try:
            await next(iter(self._decoders.values())).start()  # others when they are needed
            task_status.started()
            await self.store.run()
        finally:
            for decoder in self._decoders.values():
                await decoder.close()
            self._spool.close()


def _keep_written(model: MediaModel, tokens: Tokens) -> MediaModel:
    """Return a model without the kinds, beside images, whose tokens the tokenizer lacks.

    Raises ModelLoadError if nothing is left to serve.
    """
    for kind, other in model.others.items():
        needed = (other.layout.feature_token, *other.layout.mark_tokens)
        if missing := [token for token in needed if token not in tokens.added_tokens]:
            several = WORDS[kind].several
            why = f"the tokenizer has no token {missing[0]!r}, which this model's {several} need"
            model = model.without(kind, why)
            if model.layout is None and not model.others:
                raise ModelLoadError(why)
    return model
