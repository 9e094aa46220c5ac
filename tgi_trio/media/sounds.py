"""Decodes sounds: any file that FFmpeg's libraries read (PyAV), as one channel at a model's rate.

Files are decoded from their beginning, in one thread; each piece is mixed and resampled at once, so
that no more is held than what the model hears.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
# Demuxers: what is none could be a playlist, which names others to be opened.
_FORMATS: Final = "wav,mp3,flac,ogg,aac,mov,mp4,m4a,matroska,webm,aiff,caf"
_OPTIONS: Final = {"format_whitelist": _FORMATS, "protocol_whitelist": "", "enable_drefs": "0"}
_SERVED: Final = "WAV, MP3, FLAC, Ogg, AAC, MP4, Matroska, WebM, AIFF and CAF"
# Seconds that encoders of MP3 and AAC may add to a sound: they fill their last frame.
_PADDING: Final = 0.1


@dataclass(frozen=True, slots=True)
class SoundLimits:
    """Most of what one sound may have."""

    seconds: float  # --max-audio-seconds
    samples: int = 0  # that the model hears of one, at its rate; 0: any number


def read_sound(data: bytes, sampling_rate: int, limits: SoundLimits) -> Samples:
    """Return a sound as float32 [samples] from -1 to 1, of `sampling_rate` in a second.

    The channels' mean. Raises ValueError, before more than its limits is decoded.
    """
    most = int(limits.seconds * sampling_rate)
    parts: list[Samples] = []
    count = 0
    for part in _resample(data, sampling_rate):
        parts.append(part)
        count += len(part)
        if count > most:
            raise ValueError(
                f"it has more than {limits.seconds:g} s, which are allowed (--max-audio-seconds)"
            )
        if limits.samples and count > limits.samples + _PADDING * sampling_rate:
            raise ValueError(
                f"it has more than {limits.samples / sampling_rate:g} s, which this model hears "
                "at most: send it in parts"
            )
    if not count:
        raise ValueError("it has no samples")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise ValueError("its samples are not all numbers")
    return samples[: limits.samples or None]


def _resample(data: bytes, sampling_rate: int) -> Iterator[Samples]:
    """Yield pieces of a file's first sound; what FFmpeg's libraries refuse raises ValueError."""
    import av

    try:
        # Its notes (title, artist) are not used, whatever encoding they are in.
        with av.open(io.BytesIO(data), options=_OPTIONS, metadata_errors="replace") as container:
            if not container.streams.audio:
                raise ValueError("it has no sound")
            stream: Any = container.streams.audio[0]
            if stream.codec_context is None:
                raise ValueError(
                    "it cannot be decoded: its codec is not known here, or it is broken"
                )
            stream.thread_count = 1
            yield from _convert(container, sampling_rate)
    except av.InvalidDataError as error:
        raise ValueError(f"it is none of {_SERVED}, or broken") from error
    except (av.FFmpegError, OverflowError, IndexError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"it cannot be decoded: {why}") from error


def _convert(container: Any, sampling_rate: int) -> Iterator[Samples]:
    """Yield what is decoded, mixed and resampled."""
    from av import AudioFrame, AudioResampler

    # Channels are mixed here: FFmpeg's libraries weigh them by where loudspeakers stand.
    # Not in planes: PyAV reads beyond those of eight channels.
    plain = AudioResampler(format="flt")
    other: Any = None  # resamples, if need be
    for frame in container.decode(audio=0):
        for each in plain.resample(frame):
            packed = each.to_ndarray().reshape(-1, each.layout.nb_channels)
            mono: Samples = packed.mean(axis=1, dtype=np.float32)
            if each.sample_rate == sampling_rate:
                yield mono
                continue
            other = other or AudioResampler("fltp", "mono", sampling_rate)
            mixed = AudioFrame.from_ndarray(mono[None], "fltp", "mono")
            mixed.sample_rate = each.sample_rate
            yield from (done.to_ndarray()[0] for done in other.resample(mixed))
    if other is not None:
        yield from (done.to_ndarray()[0] for done in other.resample(None))
