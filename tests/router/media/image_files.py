"""Images for tests: what Pillow writes, and headers that lie."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file's bytes."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image that is the same for the same numbers."""
    channels = len(mode)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(values if channels > 1 else values[..., 0], mode)


def upright(image: Image.Image, orientation: int) -> bytes:
    """Return a JPEG whose EXIF data asks for a rotation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, "JPEG", exif=exif)


def claimed_png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header claims a size, whatever its data."""
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
