"""Videos of noise that moves, encoded on the spot."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import numpy as np


def make_video(
    frames: int = 20,
    height: int = 32,
    width: int = 48,
    rate: int = 10,
    seed: int = 0,
    kind: str = "mp4",
    codec: str = "libx264",
) -> bytes:
    """Return a file of so many frames at so many in a second."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    picture = blocks.repeat(8, 0).repeat(8, 1)
    memory = io.BytesIO()
    with av.open(memory, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 5 * i, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return memory.getvalue()


def read_all(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return all frames of a file, uint8 [frames, height, width, 3], as PyAV has them."""
    with av.open(io.BytesIO(data), "r") as container:
        frames: list[Any] = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        return np.stack(frames)


def video_url(data: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64,{base64.b64encode(data).decode()}"
