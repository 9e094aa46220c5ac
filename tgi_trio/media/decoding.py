"""`python -m tgi_trio.media.decoding <settings> <cpu> <wall> <bytes> <spool> <fd>`: pixels.

Each image is decoded in a child of its own (`sandbox/zygote.py`), which may die of it; a name is
made without one. What is asked about is the compressed image, or its base64, of which the question
says in which `blocks` of the file `spool` it is, and its `length` there; `beside` is as in
`PixelProcessor.process` and `FeatureExtractor.extract`, `fps` and `num_frames` as in `read_video`.
The answer is `height` and `width` as the image is seen, and of how many `bytes` the bundle is
(`ipc/images.py`) that is then in the file `fd`; where the question says how many bytes it may have
at `most`, the image's `key` in hexadecimal and its own `bytes` instead.
`settings` is a JSON object: `family`, the image processor's `settings`, what is `given` with each
image, and `max_pixels`. Where its `kind` is `video`, these are videos: `family` is a row of
`CANVASES`, and `max_frames`, `max_video_pixels` and `max_bytes` bound what one may take; the answer
has the other fields of `Clip` then. Where it is `audio` these are sounds: `family` is a row of
`EXTRACTORS`, `max_seconds` and `most_samples` bound what one may have, and the answer has the
fields of `Sound` in place of a size.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import bundle_bytes, write_bundle
from tgi_trio.media.cutting import Arrays
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.image_names import ImageNames, read_quoted
from tgi_trio.media.image_text import decode_quoted
from tgi_trio.media.packed_frames import decode_frames
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.media.sound import Sound
from tgi_trio.media.sounds import SoundLimits, read_sound
from tgi_trio.media.video_canvases import CANVASES
from tgi_trio.media.videos import VideoLimits, check_count, read_video
from tgi_trio.sandbox.zygote import Job, JobLimits, serve_jobs

FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP", "TIFF")  # TGI's


def read_pixels(data: bytes, max_pixels: int) -> NDArray[np.uint8]:
    """Return an image as it is seen, uint8 [height, width, 3]: its first frame, upright, on white.

    Raises ValueError, before anything is decoded for more pixels than `max_pixels`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError
    from transformers.image_transforms import convert_to_rgb

    Image.MAX_IMAGE_PIXELS = None  # the bound is ours
    if not data:
        raise ValueError("it has 0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise ValueError(
                f"it has {width} x {height} pixels, {max_pixels} are allowed (--max-image-pixels)"
            )
        image.load()
    except UnidentifiedImageError as error:
        served = ", ".join(FORMATS)
        raise ValueError(f"it is none of {served}, or broken at its beginning") from error
    except (OSError, SyntaxError, EOFError, IndexError, TypeError) as error:  # Pillow's for broken
        raise ValueError(f"it cannot be decoded: {error}") from error
    ImageOps.exif_transpose(image, in_place=True)
    return np.asarray(convert_to_rgb(image, return_numpy=True), np.uint8)


def _load(text: str, spool: int, results: int) -> Job:
    """Return the job that decodes images; raises ModelLoadError."""
    settings = json.loads(text)
    read: _Read = decode_quoted
    match settings.get("kind"):
        case "video":
            _load_pillow()
            process, read = _load_videos(settings)
        case "audio":
            process = _load_sounds(settings)
        case _:
            _load_pillow()
            process = _load_images(settings)
    names = ImageNames(text, None if read is decode_quoted else read)

    def decode(question: Any, data: bytes) -> Any:
        if "blocks" in question:
            longest = question["most"]
            quoted = read_quoted(spool, question["blocks"], question["length"])
            if longest is not None:
                key, nbytes = names.name(quoted, longest)
                return {"key": key, "bytes": nbytes}
            data = read(quoted, len(quoted))
            del quoted
        arrays, told = process(question, data)
        del data
        size = bundle_bytes(arrays)
        os.ftruncate(results, 0)
        os.ftruncate(results, size)
        with mmap.mmap(results, size) as memory, memoryview(memory) as view:
            write_bundle(view, arrays)
        return {**told, "bytes": size}

    return decode


def _load_pillow() -> None:
    try:
        import PIL.Image
        from PIL import _imaging
    except ImportError as error:
        raise ModelLoadError(
            f"images need Pillow: pip install 'tgi-trio[images]' ({error})"
        ) from error
    PIL.Image.init()  # loads the plugins, once
    _quiet_libtiff(_imaging.__file__)


def _quiet_libtiff(library: str | None) -> None:
    """Have libtiff, behind Pillow's own `library`, keep what it would write to standard error.

    Pillow raises an error of its own for each file that libtiff cannot read.
    """
    with contextlib.suppress(AttributeError, OSError):  # this Pillow is built without it
        ctypes.CDLL(library).TIFFSetErrorHandler(None)


# Returns the bytes that base64 stands for, as `decode_quoted` does.
_Read = Callable[[bytes | bytearray, int], bytes]
# Returns the arrays of what a question is about, and what is said of it beside them.
_Process = Callable[[Any, bytes], tuple[Arrays, dict[str, Any]]]


def _load_images(settings: Mapping[str, Any]) -> _Process:
    processor = PixelProcessor(settings["family"], settings["settings"], settings["given"])
    most = settings["max_pixels"]

    def process(question: Any, data: bytes) -> tuple[Arrays, dict[str, Any]]:
        pixels = read_pixels(data, most)
        height, width, _ = pixels.shape
        return processor.process(pixels, question["beside"]), {"height": height, "width": width}

    return process


def _load_videos(settings: Mapping[str, Any]) -> tuple[_Process, _Read]:
    try:
        import av
    except ImportError as error:
        raise ModelLoadError(
            f"videos need PyAV: pip install 'tgi-trio[video]' ({error})"
        ) from error
    av.logging.set_level(None)  # what is wrong with a file is its client's to know
    canvas = CANVASES[settings["family"]].read(settings["settings"], settings["max_frames"])
    most = settings["max_pixels"]
    limits = VideoLimits(most, settings["max_video_pixels"], settings["max_bytes"])

    def process(question: Any, data: bytes) -> tuple[Arrays, dict[str, Any]]:
        asked = question["fps"], question["num_frames"]
        arrays, clip = read_video(
            data, canvas, limits, lambda picture: read_pixels(picture, most), *asked
        )
        return arrays, clip._asdict()

    def read(quoted: bytes | bytearray, most: int) -> bytes:
        try:  # each takes memory, however few its letters
            check_count(quoted.count(b",") + 1, canvas)
        except ValueError as error:
            raise ValueError(f"invalid video: {error}") from error
        return decode_frames(quoted, most)

    return process, read


def _load_sounds(settings: Mapping[str, Any]) -> _Process:
    try:
        import av
    except ImportError as error:
        raise ModelLoadError(
            f"audio needs PyAV: pip install 'tgi-trio[audio]' ({error})"
        ) from error
    av.logging.set_level(None)
    extractor = FeatureExtractor(settings["family"], settings["settings"])
    limits = SoundLimits(settings["max_seconds"], settings["most_samples"])

    def process(question: Any, data: bytes) -> tuple[Arrays, dict[str, Any]]:
        samples = read_sound(data, extractor.sampling_rate, limits)
        sound = Sound(len(samples), extractor.sampling_rate)
        return extractor.extract(samples, question["beside"]), sound._asdict()

    return process


def _asks_for_name(question: Any) -> bool:
    """Whether base64 is only to be read and added up: of so many bytes as an image may have."""
    return question.get("most") is not None


def main(argv: list[str]) -> int:
    """Answer until standard input ends; returns the process's exit code."""
    settings, *limits, spool, results = argv
    # Image processors compute without torch, and are loaded in a quarter of the time without it.
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it tells everybody that it misses torch
    warnings.simplefilter("ignore")  # what is wrong with a file is its client's to know
    sys.modules["torch"] = None  # type: ignore[assignment]
    return serve_jobs(
        lambda: _load(settings, int(spool), int(results)),
        JobLimits.parse(limits),
        harmless=_asks_for_name,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
