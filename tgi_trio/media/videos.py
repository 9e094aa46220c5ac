"""Decodes the frames of a video that are seen.

A video is a file that FFmpeg's libraries read (PyAV), or some pictures one after the other, as they
come in a `data:video/jpeg` URL (`pack_frames`). Files are decoded from their first frame on, up to
the last that is seen, in one thread; each frame is resized at once, so that no more than one of
them is held in its own size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.media.cutting import Arrays
from tgi_trio.media.frame_cutting import choose_cutter
from tgi_trio.media.packed_frames import unpack_frames
from tgi_trio.media.video_canvas import Clip, VideoCanvas

Pixels = NDArray[np.uint8]
# Demuxers of files: what is none could be a playlist, which names others to be opened.
_FORMATS: Final = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
_OPTIONS: Final = {"format_whitelist": _FORMATS, "protocol_whitelist": "", "enable_drefs": "0"}
LISTED_RATE: Final = 1.0  # pictures in a second of those that come without a file


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Most of what one video may take."""

    frame_pixels: int  # --max-image-pixels
    video_pixels: int  # of all frames that are decoded: --max-video-pixels
    nbytes: int  # of its pixels as they are kept: --image-memory


def read_video(
    data: bytes,
    canvas: VideoCanvas,
    limits: VideoLimits,
    read_picture: Callable[[bytes], Pixels],
    fps: float | None = None,
    num_frames: int | None = None,
) -> tuple[Arrays, Clip]:
    """Return the arrays of a video's frames (`frame_cutting.py`), and what is known of it.

    `fps` and `num_frames`: of the client, for `VideoCanvas.asked`; of pictures `fps` is how many
    there are in a second, and all are seen. Raises ValueError.
    """
    pictures = unpack_frames(data)
    if pictures is not None:
        return _read_pictures(pictures, canvas, limits, read_picture, fps or LISTED_RATE)
    canvas = canvas.with_frames(fps, num_frames)
    with _opened(data) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        total, rate = stream.frames or _count_frames(container, stream), _read_rate(stream)
        if not total:
            raise ValueError("it has no frames")
        if (pixels := stream.width * stream.height) > limits.frame_pixels:
            raise ValueError(
                f"it has {stream.width} x {stream.height} pixels, {limits.frame_pixels} are "
                "allowed (--max-image-pixels)"
            )
        frames = canvas.choose(total, rate)
        if (whole := pixels * (frames[-1] + 1)) > limits.video_pixels:
            raise ValueError(
                f"{frames[-1] + 1} frames of {stream.width} x {stream.height} pixels are "
                f"{whole} to decode, {limits.video_pixels} are allowed (--max-video-pixels)"
            )
        seen = _decode(container, frames)
        first = next(seen, None)
        if first is None:
            raise ValueError("it cannot be decoded: none of its frames can")
        clip = Clip(first.shape[0], first.shape[1], frames, total, rate)
        return _cut(_chained(first, seen), clip, canvas, limits), clip


def check_count(count: int, canvas: VideoCanvas) -> None:
    """Raise ValueError for more pictures than are seen."""
    if count > canvas.max_frames:
        raise ValueError(
            f"it has {count} frames, {canvas.max_frames} are allowed (--max-video-frames, or the "
            "model's own max_frames)"
        )


def _read_pictures(
    pictures: list[bytes],
    canvas: VideoCanvas,
    limits: VideoLimits,
    read_picture: Callable[[bytes], Pixels],
    rate: float,
) -> tuple[Arrays, Clip]:
    count, canvas = len(pictures), canvas.with_rate(rate)
    check_count(count, canvas)
    if count < canvas.step:
        canvas.choose(count, rate)  # raises
    first = read_picture(pictures[0])
    clip = Clip(first.shape[0], first.shape[1], tuple(range(count)), count, rate)
    if first.shape[0] * first.shape[1] * count > limits.video_pixels:
        raise ValueError(
            f"{count} frames of {clip.width} x {clip.height} pixels are more to decode than the "
            f"{limits.video_pixels} that are allowed (--max-video-pixels)"
        )
    return _cut(_chained(first, map(read_picture, pictures[1:])), clip, canvas, limits), clip


def _chained(first: Pixels, others: Iterator[Pixels]) -> Iterator[Pixels]:
    yield first
    yield from others


def _cut(frames: Iterator[Pixels], clip: Clip, canvas: VideoCanvas, limits: VideoLimits) -> Arrays:
    """Return the arrays of frames, as many as the clip says, each resized."""
    cutter = choose_cutter(canvas)
    if (nbytes := cutter.count_bytes(clip)) > limits.nbytes:
        raise ValueError(
            f"its pixels take {nbytes} bytes, and there are {limits.nbytes} for all images "
            "(--image-memory): ask for fewer frames"
        )
    return cutter.cut(_checked(frames, clip), clip)


def _checked(frames: Iterator[Pixels], clip: Clip) -> Iterator[Pixels]:
    """Yield frames, all of one size and as many as there should be, or raise ValueError."""
    done = 0
    for frame in frames:
        if frame.shape[:2] != (clip.height, clip.width):
            raise ValueError(
                f"its frames are of several sizes: {clip.width} x {clip.height} and "
                f"{frame.shape[1]} x {frame.shape[0]}"
            )
        done += 1
        yield frame
    if done != len(clip.frames):
        raise ValueError(f"it cannot be decoded: {done} of its {len(clip.frames)} frames can")


# ---- files --------------------------------------------------------------------------------------


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open a video file; whatever FFmpeg's libraries say is wrong with it raises ValueError."""
    import av

    try:
        # Its notes (title, artist) are not used, whatever encoding they are in.
        with av.open(io.BytesIO(data), options=_OPTIONS, metadata_errors="replace") as container:
            if not container.streams.video:
                raise ValueError("it has no pictures")
            if container.streams.video[0].codec_context is None:
                raise ValueError(
                    "it cannot be decoded: its codec is not known here, or it is broken"
                )
            yield container
    except (av.FFmpegError, OverflowError, IndexError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"it cannot be decoded: {why}") from error


def _count_frames(container: Any, stream: Any) -> int:
    """Return how many frames there are, of a file that does not say so: its packets."""
    count = sum(1 for packet in container.demux(stream) if packet.size)
    container.seek(0)
    return count


def _read_rate(stream: Any) -> float:
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if not 0 < rate < float("inf"):
        raise ValueError("it does not say how many frames there are in a second")
    return rate


def _decode(container: Any, frames: Sequence[int]) -> Iterator[Pixels]:
    """Yield frames by their numbers, uint8 [height, width, 3], upright."""
    wanted = iter(frames)
    number = next(wanted, None)
    for i, frame in enumerate(container.decode(video=0)):
        while number == i:
            turned = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            yield np.ascontiguousarray(turned)
            number = next(wanted, None)
        if number is None:
            return
