"""Images are decoded in processes that may die of it: what they are, and how many bytes of pixels.

A picture of a few kilobytes can ask for gigabytes or for minutes, and decoders of five formats are
written in C. So each image has a child process of its own with so much memory and CPU time, and a
crash there is the end of one request.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from tgi_trio.errors import ModelLoadError, Unavailable, ValidationError
from tgi_trio.router.images.layouts.layout import ImageSize
from tgi_trio.router.images.spool import Compressed, EncodedImage, Spool, keeping
from tgi_trio.router.sandbox import Answer, Sandbox, SandboxCannotStart, SandboxPool, Turn

_BASE_MEMORY: Final = 128 * 2**20  # bytes a child may take, whatever the image
_PIXEL_MEMORY: Final = 16  # bytes for each pixel: as decoded, as an array, and as resized
_TEXT_MEMORY: Final = 4  # for each byte of the largest image: its base64, twice, and itself
_BASE_S: Final = 4.0  # seconds of CPU time, likewise
_PIXEL_S: Final = 5e-7
_SLOWDOWN: Final = 5.0  # how much longer than its CPU time an image may take on a busy machine
_INLINE: Final = 1 << 18  # bytes that are copied as fast as they are given to a thread
_BUSY: Final = "too many images wait to be decoded"
_AGAIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How a model's images are processed; goes to the processes as JSON."""

    family: str  # `images.processors.PROCESSORS` has it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the image processor
    given: Mapping[str, Any] = field(default_factory=dict)  # with each image
    max_pixels: int = 20_000_000  # --max-image-pixels

    def dump(self) -> str:
        """Return it as the processes read it."""
        return json.dumps(
            {
                "family": self.family,
                "settings": dict(self.settings),
                "given": dict(self.given),
                "max_pixels": self.max_pixels,
            },
            sort_keys=True,
        )


@dataclass(frozen=True, slots=True)
class ImageName:
    """What tells an image from all others."""

    key: bytes  # 32 bytes, as `image_text.start_key` has it
    nbytes: int  # compressed


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image whose pixels are there to be copied."""

    size: ImageSize  # as it is seen
    nbytes: int  # of its bundle
    _results: int  # descriptor of the file that has it

    async def copy_to(self, memory: memoryview) -> None:
        """Copy the bundle to memory of its size, a large one in a thread."""

        def copy() -> int:
            return os.preadv(self._results, [memory], 0)  # without the interpreter's lock

        copied = copy() if len(memory) <= _INLINE else await trio.to_thread.run_sync(copy)
        if copied != len(memory):
            raise RuntimeError("a bundle is smaller than it was said to be")


class ImageDecoder:
    """Decodes images. Processes start when they are needed first."""

    def __init__(
        self, settings: DecoderSettings, workers: int, spool: Spool, largest: int = 0
    ) -> None:
        """`workers`: processes at most; they read encoded images in `spool`, of `largest` bytes."""
        self._cpu = _BASE_S + _PIXEL_S * settings.max_pixels
        memory = _BASE_MEMORY + _PIXEL_MEMORY * settings.max_pixels + _TEXT_MEMORY * largest
        limits = (str(self._cpu), str(_SLOWDOWN * self._cpu), str(memory))
        argv = [sys.executable, "-m", "tgi_trio.images.decoding", settings.dump(), *limits]
        argv.append(str(spool.fd))
        sandbox = Sandbox("images", argv, workers, results=True, fds=[spool.fd])
        self._pool = SandboxPool(sandbox, _BUSY)

    async def start(self) -> None:
        """Have one process ready; raises ModelLoadError where none can be had."""
        async with self._pool.turn() as turn:
            try:
                await turn.begin()
            except SandboxCannotStart as error:
                raise ModelLoadError(f"images cannot be served: {error}") from error

    async def close(self) -> None:
        """End all processes that wait for work."""
        await self._pool.close()

    async def name(self, image: EncodedImage, most: int) -> ImageName:
        """Return what an image is called, where what came is base64 of `most` bytes at most.

        Raises as `decode` does.
        """
        with keeping(image):
            async with self._pool.turn() as turn:
                answer = await self._ask(turn, _job(image, most))
        if answer.wrong is not None:
            raise ValidationError(answer.wrong)
        found = answer.value
        return ImageName(bytes.fromhex(found["key"]), found["bytes"])

    @asynccontextmanager
    async def decode(self, data: Compressed) -> AsyncIterator[DecodedImage]:
        """Decode an image, and keep its pixels for the block.

        Raises ValidationError, Overloaded or Unavailable where the machine is too busy, and
        GenerationError for an image whose client has left.
        """
        with keeping(data):
            async with self._pool.turn() as turn:
                if isinstance(data, EncodedImage):
                    answer = await self._ask(turn, _job(data))
                else:
                    answer = await self._ask(turn, None, data)
                if answer.wrong is not None:
                    raise ValidationError(f"invalid image: {answer.wrong}")
                found = answer.value
                size = ImageSize(found["height"], found["width"])
                yield DecodedImage(size, found["bytes"], turn.results)

    async def _ask(self, turn: Turn, job: Any, data: bytes | bytearray = b"") -> Answer:
        """Return what a process makes of an image, or what is wrong with it.

        Raises as `decode` does where the process did not live to say it.
        """
        try:
            answer = await turn.ask(job, data, within=_SLOWDOWN * self._cpu)
        except SandboxCannotStart as error:
            raise Unavailable(f"images cannot be decoded now: {error}", _AGAIN_S) from error
        _check_end(answer)
        return answer


def _job(image: EncodedImage, most: int | None = None) -> Any:
    """Return the question about an image in the spool: its pixels, or with `most` its name."""
    return {"blocks": image.blocks, "length": image.length, "most": most}


def _check_end(answer: Answer) -> None:
    """Raise ValidationError or Unavailable where a signal ended whoever had an image."""
    if answer.killed:
        raise Unavailable(
            "the process that decoded the image has ended before it was done", _AGAIN_S
        )
    match answer.signal:
        case 0:
            pass
        case signal.SIGPROF:
            raise ValidationError("invalid image: decoding it takes too much time")
        case signal.SIGALRM:
            raise Unavailable("this machine is too busy to decode the image", _AGAIN_S)
        case _:
            raise ValidationError("invalid image: decoding it takes too much memory")
