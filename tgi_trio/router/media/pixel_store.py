"""What media hold in the arena, the pixels of images: places by content, also kept as a cache.

A place is *pinned* while a shard may still read it; others stay as a cache, evicted least recently
used first. An image without a place is decoded again from its compressed bytes as soon as there is
room: if the arena is full, it waits in line and does not fail. An image that still cannot be
decoded after several tries is given up, with the requests that wait for it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from tgi_trio.errors import GenerationError, TgiTrioError, ValidationError
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.router.media.layouts.layout import Size
from tgi_trio.router.media.pixel_options import PLAIN, PixelOptions
from tgi_trio.router.media.places import FreeSpace, align
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.media.spool import Compressed, EncodedImage

log = logging.getLogger(__name__)

_REMEMBERED: Final = 4096  # most images whose size is known without decoding
_RETRY_S: Final = 1.0  # seconds before an image that could be decoded before is tried again
_TRIES: Final = 20  # most tries of an image in a row, as a busy machine may need several


class Arena(Protocol):
    """Shared memory for bundles (`ipc.images.ImageArena`)."""

    @property
    def nbytes(self) -> int: ...
    def view(self, place: ArenaPlace) -> memoryview: ...


class Decoded(Protocol):
    """An image whose pixels are ready to be copied (`decoder.DecodedImage`)."""

    @property
    def size(self) -> Size: ...
    @property
    def nbytes(self) -> int: ...
    async def copy_to(self, memory: memoryview) -> None: ...


# `ImageDecoder.decode`: keeps the pixels of an encoded image, seen in some manner, for a block.
Decode = Callable[[Compressed, PixelOptions], AbstractAsyncContextManager[Decoded]]


@dataclass(frozen=True, slots=True)
class KnownImage:
    """What is known of an image that has been decoded once."""

    size: Size  # after its EXIF rotation
    nbytes: int  # of its bundle


@dataclass(slots=True)
class _Kept:
    """Pixels in the arena."""

    place: ArenaPlace
    ready: bool = False  # False: they are being written
    pins: int = 0
    fresh: bool = True  # they have not been pinned yet

    @property
    def evictable(self) -> bool:
        return self.ready and not self.pins


class PixelStore:
    """Places of images in one arena. Everything but `find_size` and `run` is synchronous."""

    def __init__(self, arena: Arena, decode: Decode, workers: int = 1) -> None:
        """`workers`: images that are decoded again at the same time."""
        self._arena = arena
        self._decode = decode
        self._workers = workers
        self._free = FreeSpace(arena.nbytes)
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # by key, least recently used first
        self._known: OrderedDict[bytes, KnownImage] = OrderedDict()  # ordered likewise
        self._looking: dict[bytes, trio.Event] = {}  # being decoded for the first time
        self._line: deque[PromptImage] = deque()  # wait for a place, to be decoded again
        self._awaited: set[bytes] = set()  # keys of those, and of what is being decoded again
        self._active = 0  # images that are being decoded again
        self._news = trio.Event()  # set if an image is in line, or there may be room
        self._failures: Counter[bytes] = Counter()  # failures in a row, by key, of awaited images
        self._on_ready: Callable[[bytes], None] = lambda key: None
        self._on_lost: Callable[[bytes, str], None] = lambda key, why: None

    def on_ready(self, callback: Callable[[bytes], None]) -> None:
        """Have `callback` called with the key of each image that was missing when it was wanted.

        Then it is worth trying to pin it again; if decoding failed, that puts it in line again.
        """
        self._on_ready = callback

    def on_lost(self, callback: Callable[[bytes, str], None]) -> None:
        """Have `callback` called with the key of each image that is given up, and the reason.

        Requests that wait for it wait in vain; asking again has it tried again.
        """
        self._on_lost = callback

    # ---- the engine's side ----------------------------------------------------------------------

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        """Return where the pixels are, until `unpin`; None if they are not there.

        In that case they are decoded, and `on_ready` reports it.
        """
        kept = self._kept.get(image.key)
        if kept is not None and kept.ready:
            kept.pins += 1
            kept.fresh = False
            self._kept.move_to_end(image.key)
            return kept.place
        if image.key not in self._awaited:
            self._awaited.add(image.key)
            if isinstance(image.data, EncodedImage):
                image.data.keep()  # the request may end before it is decoded
            self._line.append(image)
            self._news.set()
        return None

    def unpin(self, image: PromptImage) -> None:
        """Undo one `pin` that returned a place."""
        kept = self._kept[image.key]
        if not kept.pins:
            raise RuntimeError("an image is unpinned more often than it was pinned")
        kept.pins -= 1
        if not kept.pins:
            self._news.set()

    # ---- the requests' side ---------------------------------------------------------------------

    def check_room(self, sizes: Mapping[bytes, int]) -> None:
        """Raise ValidationError if images (key -> bytes) can never be in the arena together."""
        wanted = sum(map(align, sizes.values()))
        if wanted > self._arena.nbytes:
            raise ValidationError(
                f"the images of the prompt take {wanted} bytes of pixels together, and there are "
                f"{self._arena.nbytes} for all images (--image-memory)"
            )

    def knows(self, key: bytes) -> bool:
        """Return whether an image's size is known without decoding it."""
        return key in self._known

    async def find_size(
        self, key: bytes, data: Compressed, pixel_options: PixelOptions = PLAIN
    ) -> KnownImage:
        """Return an image's size; concurrent calls decode it only once.

        Its pixels are kept if there is room. Raises ValidationError if it cannot be decoded or can
        never fit, Overloaded or Unavailable if the machine is too busy.
        """
        while (others := self._looking.get(key)) is not None:
            await others.wait()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            if key in self._kept:
                self._kept.move_to_end(key)
            return known
        self._looking[key] = trio.Event()
        try:
            async with self._decode(data, pixel_options) as image:
                known = KnownImage(image.size, image.nbytes)
                self._check_size(image.nbytes)
                await self._keep(key, image)
        finally:
            self._looking.pop(key).set()
        self._known[key] = known
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    def _check_size(self, nbytes: int) -> None:
        if align(nbytes) > self._arena.nbytes:
            raise ValidationError(
                f"invalid image: its pixels take {nbytes} bytes, and there are "
                f"{self._arena.nbytes} for all images (--image-memory)"
            )

    async def _keep(self, key: bytes, image: Decoded) -> None:
        """Keep pixels if there is room, but not before images that have waited longer."""
        if self._line or key in self._kept:
            return
        place = self._make_room(image.nbytes, spare_fresh=True)
        if place is not None:
            await self._fill(key, place, image)

    # ---- decoding again -------------------------------------------------------------------------

    async def run(self) -> None:
        """Decode the images that were to be pinned and are missing, in turn, for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._news.wait()
                self._news = trio.Event()
                while self._line and self._active < self._workers:
                    image = self._line[0]
                    kept = self._kept.get(image.key)
                    if kept is not None and not kept.ready:
                        break  # `find_size` is writing it, and sets `_news` when it is done
                    place = None if kept is not None else self._make_room(image.nbytes)
                    if kept is None and place is None:
                        break  # `unpin` sets `_news`
                    self._line.popleft()
                    if place is None:
                        self._report(image)
                    else:
                        self._active += 1
                        self._kept[image.key] = _Kept(place)
                        nursery.start_soon(self._decode_again, image, place)

    async def _decode_again(self, image: PromptImage, place: ArenaPlace) -> None:
        try:
            async with self._decode(image.data, image.pixel_options) as found:
                if found.nbytes != place.nbytes:
                    raise GenerationError(f"{found.nbytes} bytes of pixels, not {place.nbytes}")
                await self._fill(image.key, place, found)
        except TgiTrioError as error:  # the machine is busy, as it has been decoded before
            lost = self._note_failure(image, str(error))
            if not lost:
                log.warning("an image cannot be decoded again, and waits in line: %s", error)
                await trio.sleep(_RETRY_S)
        except Exception as error:  # an unexpected error ends the requests with this image
            log.exception("an image cannot be decoded again")
            lost = self._note_failure(image, f"{type(error).__name__}: {error}", last=True)
        else:
            lost = ""
        finally:
            self._active -= 1
            self._news.set()
        self._report(image, lost)

    def _note_failure(self, image: PromptImage, why: str, *, last: bool = False) -> str:
        """Free the place of an image; return why it is given up, "" if it is tried again."""
        if image.key in self._kept:
            self._drop(image.key)
        self._failures[image.key] += 1
        if not last and self._failures[image.key] < _TRIES:
            return ""
        return f"an image of it cannot be decoded again: {why}"

    def _report(self, image: PromptImage, lost: str = "") -> None:
        """Report an image that is no longer in line; `lost`: why it is given up."""
        if isinstance(image.data, EncodedImage):
            image.data.let_go()
        self._awaited.discard(image.key)
        if lost:
            self._on_lost(image.key, lost)
        else:
            self._on_ready(image.key)
        if image.key not in self._awaited:  # it is there, or lost, or not wanted any more
            self._failures.pop(image.key, None)

    # ---- places ---------------------------------------------------------------------------------

    async def _fill(self, key: bytes, place: ArenaPlace, image: Decoded) -> None:
        """Write pixels to their place; an exception leaves nothing behind."""
        kept = self._kept[key] = _Kept(place)
        try:
            await image.copy_to(self._arena.view(place))
            kept.ready = True
        finally:
            if not kept.ready:
                self._drop(key)
            self._news.set()

    def _make_room(self, nbytes: int, *, spare_fresh: bool = False) -> ArenaPlace | None:
        """Return a new place, or None; other images are evicted for it.

        Images that have not been pinned yet are evicted last; with `spare_fresh`, never.
        """
        evictable = [(key, kept) for key, kept in self._kept.items() if kept.evictable]
        used = [each for each in evictable if not each[1].fresh]
        fresh = [] if spare_fresh else [each for each in evictable if each[1].fresh]
        others = {key: align(kept.place.nbytes) for key, kept in (*used, *fresh)}
        if self._free.nbytes + sum(others.values()) < align(nbytes):
            return None
        victims = iter(others)
        while (offset := self._free.take(nbytes)) is None:
            victim = next(victims, None)
            if victim is None:  # pinned places are in between
                return None
            self._drop(victim)
        return ArenaPlace(offset, nbytes)

    def _drop(self, key: bytes) -> None:
        place = self._kept.pop(key).place
        self._free.give_back(place.offset, place.nbytes)

    def check(self) -> None:
        """Raise RuntimeError unless places and holes cover each byte of the arena once."""
        places = [(each.place.offset, align(each.place.nbytes)) for each in self._kept.values()]
        end, hole_before = 0, False
        for offset, size, hole in sorted(
            [(*each, False) for each in places] + [(*each, True) for each in self._free.holes]
        ):
            if offset != end or (hole and hole_before):
                raise RuntimeError(f"the arena is not whole at byte {end}")
            end, hole_before = offset + size, hole
        if end != self._arena.nbytes:
            raise RuntimeError(f"{self._arena.nbytes - end} bytes of the arena are lost")
        if any(each.pins < 0 or (each.pins and not each.ready) for each in self._kept.values()):
            raise RuntimeError("an image is pinned that is not there")
        if not {image.key for image in self._line} <= self._awaited:
            raise RuntimeError("an image is in line that nobody waits for")
