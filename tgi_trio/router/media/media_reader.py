"""Fetches and decodes a prompt's images and the like, and expands their tokens in its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from tgi_trio.errors import (
    ExcessiveLength,
    ModelLoadError,
    PromptTooLong,
    TgiTrioError,
    ValidationError,
    naming_param,
)
from tgi_trio.media.image_text import start_key
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.media.byte_budget import ByteBudget, HeldBytes
from tgi_trio.router.media.data_urls import (
    decode_data_url,
    decode_video_url,
    find_base64,
    is_data_url,
)
from tgi_trio.router.media.decoder import ImageName
from tgi_trio.router.media.image_prompt import (
    DecodableImage,
    ExpandedPrompt,
    ImagePrompt,
    expand_prompt,
)
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.media.layouts.layout import ImageLayout, Layout, OtherLayout
from tgi_trio.router.media.links import MediaLink
from tgi_trio.router.media.pixel_options import PixelOptions
from tgi_trio.router.media.pixel_store import PixelStore
from tgi_trio.router.media.spool import Compressed, EncodedImage, Spool

_INLINE: Final = 1 << 14  # bytes for which hashing is as fast as the way to a thread
_FETCHES: Final = 16  # most images that are fetched at a time, for all requests


class Fetch(Protocol):
    """Fetches a URL (`MediaFetcher`). Raises ValidationError, and what `take` raises."""

    async def fetch(self, url: str, take: Callable[[int], object]) -> bytes: ...


class Namer(Protocol):
    """Computes keys of images in the spool (`ImageDecoder`). Raises as `ImageDecoder.decode`."""

    async def name(self, image: EncodedImage, most: int) -> ImageName: ...


class Tokens(Protocol):
    """The tokenizer's special tokens (`text.tokenizer.Tokenizer`)."""

    @property
    def added_tokens(self) -> Mapping[str, int]: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...


class Counts(Protocol):
    """Metrics (`telemetry.metrics.Metrics`)."""

    def inc(self, name: str, value: float = 1) -> None: ...
    def observe(self, name: str, value: float) -> None: ...


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on a prompt's images; each field is named after its flag."""

    max_images_per_prompt: int = 8
    max_image_fetch_size: int = 20 * 2**20  # bytes, also for data URLs
    max_image_bytes: int = 128 * 2**20  # bytes of encoded images, of all requests


AnyLayout = TypeVar("AnyLayout", bound=Layout)


@dataclass(frozen=True)
class Reading(Generic[AnyLayout]):
    """How a model's images are read, or others that are no images."""

    layout: AnyLayout
    namer: Namer
    # Distinguishes settings that yield different pixels for the same bytes.
    processed_as: str = ""


class MediaReader:
    """Reads the images and the like of prompts, for all requests of a model."""

    def __init__(
        self,
        pictures: Reading[ImageLayout] | None,
        tokenizer: Tokens,
        fetcher: Fetch,
        store: PixelStore,
        spool: Spool,
        metrics: Counts,
        limits: MediaLimits,
        readings: Mapping[Kind, Reading[OtherLayout]] = MappingProxyType({}),
        unserved: Mapping[Kind, str] = MappingProxyType({}),
    ) -> None:
        """`pictures`: how images are read; None: the model does not see.

        `spool`: of images that are being received, which the namers read; `readings`: of what is no
        image; `unserved`: why others are not read. Raises ModelLoadError for a tokenizer without
        the layouts' tokens.
        """
        layout = None if pictures is None else pictures.layout
        layouts = [] if layout is None else [layout]
        featured: list[str] = []
        for each in (*layouts, *(reading.layout for reading in readings.values())):
            featured += (each.feature_token, *each.mark_tokens)
        marks = [each.placeholder for each in layouts if not each.placeholder_is_text]
        for token in (*marks, *featured):
            if token not in tokenizer.added_tokens:
                raise ModelLoadError(
                    f"the tokenizer has no token {token!r}, which this model's images need"
                )
        self.layout = layout
        self.others = {kind: reading.layout for kind, reading in readings.items()}
        self.unserved = unserved
        self.spool = spool
        self._feature_ids = {token: tokenizer.added_tokens[token] for token in featured}
        self._bos = tokenizer.special_tokens.get("bos_token", "")
        self._fetcher = fetcher
        self._store = store
        self._metrics = metrics
        self._limits = limits
        self._bytes = ByteBudget(limits.max_image_bytes)
        self._fetching = trio.CapacityLimiter(_FETCHES)
        self._decoding = trio.Lock()  # of base64, in the loop: each turn of it decodes one slice
        all_readings: dict[Kind, Reading[Any]] = {**readings}
        if pictures is not None:
            all_readings["image"] = pictures
        self._namers = {kind: reading.namer for kind, reading in all_readings.items()}
        self._firsts = {
            kind: start_key(reading.processed_as) for kind, reading in all_readings.items()
        }

    def hold_bytes(self) -> AbstractContextManager[HeldBytes]:
        """Return the byte budget of one request's images, for as long as it keeps them."""
        return self._bytes.hold()

    async def read(
        self, prompt: ImagePrompt, max_input_tokens: int, held: HeldBytes
    ) -> ExpandedPrompt:
        """Return a prompt with all tokens of its images, whose bytes count in `held`.

        Raises ValidationError, and Overloaded or Unavailable if the machine is too busy.
        """
        links = prompt.links
        if len(links) > self._limits.max_images_per_prompt:
            raise ValidationError(
                f"the prompt has {len(links)} images, {self._limits.max_images_per_prompt} are "
                "allowed (--max-images-per-prompt)"
            )
        images = await self._size_all(links, held)
        self._store.check_room({image.key: image.nbytes for image in images})
        found = expand_prompt(
            prompt, images, self.layout, self._bos, self._feature_ids, self.others
        )
        if found.features > max_input_tokens:
            raise PromptTooLong(
                f"`inputs` must have less than {max_input_tokens} tokens. Given: "
                f"{found.features} of images alone",
                ExcessiveLength(found.features, max_input_tokens, max_input_tokens),
            )
        counts = Counter(image.pixel_options.kind for image in images)
        self._metrics.inc("tgi_image_count", counts.pop("image", 0))
        for kind, count in counts.items():
            self._metrics.inc(f"tgi_{kind}_count", count)
        self._metrics.inc("tgi_image_tokens", found.features)
        return found

    async def _size_all(self, links: Sequence[MediaLink], held: HeldBytes) -> list[DecodableImage]:
        """Return all images in order; the first failure is raised and cancels the others."""
        beside = self._find_beside(links)
        if len(links) == 1:
            return [await self._size(links[0], held, beside)]
        found: dict[int, DecodableImage] = {}
        failures: list[TgiTrioError] = []

        async def see(i: int) -> None:
            try:
                found[i] = await self._size(links[i], held, beside)
            except TgiTrioError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for i in range(len(links)):
                nursery.start_soon(see, i)
        if failures:
            raise failures[0]
        return [found[i] for i in range(len(links))]

    def _find_beside(self, links: Sequence[MediaLink]) -> frozenset[Kind]:
        """Return the kinds that a tower sees or hears otherwise beside all these."""
        pictures = sum(link.kind == "image" for link in links)
        found = {kind for kind, each in self.others.items() if pictures and each.minds_images}
        if self.layout is not None and self.layout.among(pictures) is not self.layout:
            found.add("image")
        return frozenset(found)

    async def _size(
        self, link: MediaLink, held: HeldBytes, beside: frozenset[Kind]
    ) -> DecodableImage:
        with naming_param(link.field):
            return await self._size_link(link, held, beside)

    async def _size_link(
        self, link: MediaLink, held: HeldBytes, beside: frozenset[Kind]
    ) -> DecodableImage:
        data, key = await self._load(link, held)
        pixel_options = PixelOptions(link.kind in beside, link.kind, link.fps, link.num_frames)
        key = pixel_options.distinguish(key)
        hit, began = self._store.knows(key), trio.current_time()
        known = await self._store.find_size(key, data, pixel_options)
        if hit:
            self._metrics.inc("tgi_image_cache_hits")
        else:
            self._metrics.observe("tgi_image_decode_duration", trio.current_time() - began)
        return DecodableImage(data, key, known.size, known.nbytes, pixel_options)

    async def _load(self, link: MediaLink, held: HeldBytes) -> tuple[Compressed, bytes]:
        """Return an encoded image and its key. Raises ValidationError."""
        url, most = link.url, self._limits.max_image_fetch_size
        data: bytes | bytearray
        if is_data_url(url) or ":" not in url:
            find_base64(url, link.kind)
            if link.encoded is not None:
                name = await self._namers[link.kind].name(link.encoded, most)
                held.take(name.nbytes)
                return link.encoded, name.key
            async with self._decoding:
                decode = decode_video_url if link.kind == "video" else decode_data_url
                data = await decode(url, most)
            held.take(len(data))
        else:
            async with self._fetching:
                began = trio.current_time()
                data = await self._fetcher.fetch(url, held.take)
                self._metrics.observe("tgi_image_fetch_duration", trio.current_time() - began)
        return data, await _in_thread(len(data), lambda: self._make_key(data, link.kind))

    def _make_key(self, data: bytes | bytearray, kind: Kind) -> bytes:
        found = self._firsts[kind].copy()
        found.update(data)  # releases the interpreter's lock
        return found.digest()


async def _in_thread(size: int, function: Callable[[], bytes]) -> bytes:
    """Return the result of a function of `size` bytes, which runs in a thread if they are many."""
    if size <= _INLINE:
        return function()
    return await run_in_thread(function)
