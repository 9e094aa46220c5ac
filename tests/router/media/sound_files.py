"""Sounds of tones in noise, encoded on the spot."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray


def make_samples(
    seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0
) -> NDArray[np.int16]:
    """Return int16 [channels, samples]."""
    draw = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    pitch = draw.uniform(200, 2000, (channels, 1))
    loud = np.sin(2 * np.pi * pitch * time) + draw.normal(0, 0.1, (channels, len(time)))
    return np.clip(loud * 12_000, -32768, 32767).astype(np.int16)


def encode_sound(
    samples: NDArray[np.int16], rate: int = 16_000, kind: str = "wav", codec: str = "pcm_s16le"
) -> bytes:
    """Return a file of these samples, int16 [channels, samples]."""
    memory = io.BytesIO()
    layout = "mono" if len(samples) == 1 else "stereo"
    with av.open(memory, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        packed = np.ascontiguousarray(samples.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return memory.getvalue()


def make_sound(seconds: float, rate: int = 16_000, seed: int = 0) -> bytes:
    """Return a WAV file of one channel."""
    return encode_sound(make_samples(seconds, rate, seed=seed), rate)


def as_floats(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return samples as they are heard, float32 [samples]."""
    return (samples.astype(np.float32) / 32768).mean(axis=0, dtype=np.float32)


def audio_part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """Return the part of a message, in OpenAI's shape."""
    sound = {"data": base64.b64encode(data).decode(), "format": kind}
    return {"type": "input_audio", "input_audio": sound}
