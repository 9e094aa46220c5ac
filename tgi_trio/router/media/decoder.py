"""Decodes images, videos and sounds in child processes, which may crash.

An image of a few kilobytes can require gigabytes or minutes, and the decoders of five formats are
written in C. So each image has a child process of its own with limited memory and CPU time, and a
crash there ends only one request.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import trio

from tgi_trio.errors import ModelLoadError, Unavailable, ValidationError
from tgi_trio.media.sound import Sound
from tgi_trio.media.video_canvas import Clip
from tgi_trio.router.media.kinds import WORDS, Kind
from tgi_trio.router.media.layouts.layout import ImageSize, Size
from tgi_trio.router.media.pixel_options import PLAIN, PixelOptions
from tgi_trio.router.media.spool import Compressed, EncodedImage, Spool, keeping
from tgi_trio.router.sandbox_pool import Answer, Sandbox, SandboxCannotStart, SandboxPool, Turn

_BASE_MEMORY: Final = 128 * 2**20  # bytes that a child may take for any image
_PIXEL_MEMORY: Final = 16  # bytes for each pixel: decoded, as an array, and resized
_TEXT_MEMORY: Final = 4  # for each byte of the largest image: its base64, twice, and itself
_BASE_S: Final = 4.0  # seconds of CPU time for any image
_PIXEL_S: Final = 5e-7
_SLOWDOWN: Final = 5.0  # wall-clock limit over the CPU limit, for busy machines
_INLINE: Final = 1 << 18  # bytes for which a copy is as fast as the way to a thread
_FRAME_MEMORY: Final = 64  # bytes for each pixel of a frame: those that others are told from
_FRAME_S: Final = 2.5e-8  # for each pixel of all frames: ten times what H.264 took on an EPYC
_SOUND_MEMORY: Final = 8 * 2**20  # bytes for each second of a sound: its spectrum, several times
_SOUND_S: Final = 0.06  # for each second of a sound: ten times what Opus took on an EPYC
_RETRY_AFTER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class DecodingBounds:
    """What may be taken to decode one thing, by flags of these names, and `nbytes` of arena."""

    max_image_pixels: int
    max_video_frames: int
    max_video_pixels: int
    max_audio_seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How a model's images are processed; sent to the processes as JSON."""

    family: str  # a key of `media.processors.PROCESSORS`
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the image processor
    given: Mapping[str, Any] = field(default_factory=dict)  # options passed with each image
    max_pixels: int = 20_000_000  # --max-image-pixels

    kind: ClassVar[Kind] = "image"

    def dump(self) -> str:
        """Return the settings as JSON for the processes."""
        return json.dumps(self._describe(), sort_keys=True)

    def _describe(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "settings": dict(self.settings),
            "given": dict(self.given),
            "max_pixels": self.max_pixels,
        }

    @property
    def cpu(self) -> float:
        """Seconds of CPU time that one may take."""
        return _BASE_S + _PIXEL_S * self.max_pixels

    @property
    def memory(self) -> int:
        """Bytes that one may take, beside those of its file."""
        return _BASE_MEMORY + _PIXEL_MEMORY * self.max_pixels


@dataclass(frozen=True, slots=True)
class VideoDecoderSettings(DecoderSettings):
    """How a model's videos are processed; `family` is a key of `media.video_canvases.CANVASES`."""

    max_frames: int = 768  # --max-video-frames
    max_video_pixels: int = 4_000_000_000  # --max-video-pixels
    max_bytes: int = 256 * 2**20  # of pixels: --image-memory

    kind: ClassVar[Kind] = "video"

    def _describe(self) -> dict[str, Any]:
        bounds = {name: getattr(self, name) for name in _BOUNDS}
        return {**DecoderSettings._describe(self), **bounds, "kind": self.kind}

    @property
    def cpu(self) -> float:
        return _BASE_S + _FRAME_S * self.max_video_pixels

    @property
    def memory(self) -> int:
        return _BASE_MEMORY + _FRAME_MEMORY * self.max_pixels + 2 * self.max_bytes


@dataclass(frozen=True, slots=True)
class AudioDecoderSettings(DecoderSettings):
    """How a model's sounds are processed; `family`: of `media.feature_extractors.EXTRACTORS`."""

    max_seconds: float = 600.0  # --max-audio-seconds
    sampling_rate: int = 16_000
    most_samples: int = 0  # that the model hears of one, at its rate; 0: any number

    kind: ClassVar[Kind] = "audio"

    def _describe(self) -> dict[str, Any]:
        bounds = {"max_seconds": self.max_seconds, "most_samples": self.most_samples}
        return {**DecoderSettings._describe(self), **bounds, "kind": self.kind}

    @property
    def _seconds(self) -> float:
        heard = self.most_samples / self.sampling_rate
        return min(self.max_seconds, heard) if heard else self.max_seconds

    @property
    def cpu(self) -> float:
        return _BASE_S + _SOUND_S * self._seconds

    @property
    def memory(self) -> int:
        return _BASE_MEMORY + int(_SOUND_MEMORY * self._seconds)


_BOUNDS: Final = ("max_frames", "max_video_pixels", "max_bytes")


@dataclass(frozen=True, slots=True)
class ImageName:
    """Identifies an image by its content."""

    key: bytes  # 32 bytes, see `image_text.start_key`
    nbytes: int  # compressed


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image whose pixels are ready to be copied."""

    size: Size  # after its EXIF rotation
    nbytes: int  # of its bundle
    _results: int  # descriptor of the file that contains it

    async def copy_to(self, memory: memoryview) -> None:
        """Copy the bundle into `memory`, which has its size; a large one in a thread."""

        def copy() -> int:
            return os.preadv(self._results, [memory], 0)  # without the interpreter's lock

        copied = copy() if len(memory) <= _INLINE else await trio.to_thread.run_sync(copy)
        if copied != len(memory):
            raise RuntimeError("a bundle is smaller than it was said to be")


class ImageDecoder:
    """Decodes images in processes, which start when they are first needed."""

    def __init__(
        self, settings: DecoderSettings, workers: int, spool: Spool, largest: int = 0
    ) -> None:
        """`workers`: most processes, which read encoded images in `spool`, of `largest` bytes."""
        self._kind, self._cpu = settings.kind, settings.cpu
        memory = settings.memory + _TEXT_MEMORY * largest
        limits = (str(self._cpu), str(_SLOWDOWN * self._cpu), str(memory))
        argv = [sys.executable, "-m", "tgi_trio.media.decoding", settings.dump(), *limits]
        argv.append(str(spool.fd))
        self._several = name = WORDS[self._kind].several
        sandbox = Sandbox(name, argv, workers, results=True, fds=[spool.fd])
        self._pool = SandboxPool(sandbox, f"too many {name} wait to be decoded")

    async def start(self) -> None:
        """Start one process. Raises ModelLoadError if that fails."""
        async with self._pool.turn() as turn:
            try:
                await turn.begin()
            except SandboxCannotStart as error:
                raise ModelLoadError(f"{self._several} cannot be served: {error}") from error

    async def close(self) -> None:
        """End all idle processes."""
        await self._pool.close()

    async def name(self, image: EncodedImage, most: int) -> ImageName:
        """Return the key and size of an image in base64, of at most `most` bytes.

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
    async def decode(
        self, data: Compressed, pixel_options: PixelOptions = PLAIN
    ) -> AsyncIterator[DecodedImage]:
        """Decode an image, and keep its pixels for the block.

        Raises ValidationError, Overloaded or Unavailable if the machine is too busy, and
        GenerationError if the image's client has left.
        """
        with keeping(data):
            async with self._pool.turn() as turn:
                if isinstance(data, EncodedImage):
                    answer = await self._ask(turn, _job(data, pixel_options=pixel_options))
                else:
                    answer = await self._ask(turn, _describe_pixel_options(pixel_options), data)
                if answer.wrong is not None:
                    raise ValidationError(f"invalid {self._kind}: {answer.wrong}")
                found = answer.value
                yield DecodedImage(_read_size(found), found["bytes"], turn.results)

    async def _ask(self, turn: Turn, job: Any, data: bytes | bytearray = b"") -> Answer:
        """Return the answer of a process about an image: a result, or an error.

        Raises as `decode` does if the process has not survived to answer.
        """
        try:
            answer = await turn.ask(job, data, within=_SLOWDOWN * self._cpu)
        except SandboxCannotStart as error:
            why = f"{self._several} cannot be decoded now: {error}"
            raise Unavailable(why, _RETRY_AFTER_S) from error
        _check_end(answer, self._kind)
        return answer


def _job(image: EncodedImage, most: int | None = None, pixel_options: PixelOptions = PLAIN) -> Any:
    """Return the job for an image in the spool: its pixels, or with `most` its key."""
    return {
        "blocks": image.blocks,
        "length": image.length,
        "most": most,
        **_describe_pixel_options(pixel_options),
    }


def _describe_pixel_options(pixel_options: PixelOptions) -> Any:
    return {
        "beside": pixel_options.beside,
        "fps": pixel_options.fps,
        "num_frames": pixel_options.num_frames,
    }


def _read_size(found: Mapping[str, Any]) -> Size:
    """Return what an answer says of an image, a video or a sound."""
    if "samples" in found:
        return Sound(found["samples"], found["sampling_rate"])
    if "frames" not in found:
        return ImageSize(found["height"], found["width"])
    shown = {name: found[name] for name in Clip._fields}
    return Clip(**{**shown, "frames": tuple(found["frames"])})


def _check_end(answer: Answer, kind: str) -> None:
    """Raise ValidationError or Unavailable if a signal ended the process of an image."""
    if answer.killed:
        raise Unavailable(
            f"the process that decoded the {kind} has ended before it was done", _RETRY_AFTER_S
        )
    match answer.signal:
        case 0:
            pass
        case signal.SIGPROF:
            raise ValidationError(f"invalid {kind}: decoding it takes too much time")
        case signal.SIGALRM:
            raise Unavailable(f"this machine is too busy to decode the {kind}", _RETRY_AFTER_S)
        case _:
            raise ValidationError(f"invalid {kind}: decoding it takes too much memory")
