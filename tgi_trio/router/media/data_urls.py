"""Media inside a request: ``data:image/png;base64,...``, the form of RFC 2397 that TGI accepts.

Large ones are cut out of bodies (`http.messages.body_images`) and decoded from base64 by the image
decoder. The others are decoded in the event loop rather than in threads: a thread would hold the
interpreter's lock for longer than a slice takes, which would block this process just as well.
"""

from __future__ import annotations

from typing import Final

import msgspec
import trio

from tgi_trio.errors import ValidationError
from tgi_trio.media.image_text import INVALID, size_error
from tgi_trio.media.packed_frames import pack_frames
from tgi_trio.router.media.kinds import Kind

_SHOWN: Final = 80  # most characters of a URL in an error
_SLICE: Final = 1 << 17  # characters decoded at once, in less than a fifth of a millisecond
_TINY_FRAMES: Final = 64  # pictures of a few bytes decoded at once, in about as long
_BYTES: Final = msgspec.json.Decoder(bytes)


async def decode_data_url(url: str, most: int) -> bytes | bytearray:
    """Return the bytes of a data URL.

    The MIME type is ignored: the bytes themselves show their format. Raises ValidationError, with
    TGI's messages where it has any; also for more than `most` bytes, before they are decoded.
    """
    return await _decode_text(url[find_base64(url) :], most)


async def decode_video_url(url: str, most: int) -> bytes | bytearray:
    """Do the same for a video, which may be several pictures in base64 with commas between."""
    texts = url[find_base64(url, "video") :].split(",")
    if len(texts) == 1:
        return await _decode_text(texts[0], most)
    frames: list[bytes | bytearray] = []
    size = 0
    for text in texts:
        frames.append(await _decode_text(text, most))
        if (size := size + len(frames[-1])) > most:
            raise ValidationError(size_error(size, most))
        if len(frames) % _TINY_FRAMES == 0:
            await trio.lowlevel.checkpoint()
    return pack_frames(frames)


async def _decode_text(text: str, most: int) -> bytes | bytearray:
    written = text.encode("utf-8", "surrogatepass")
    if b"\\" in written:  # it would be an escape in the JSON string below
        raise _invalid()
    return await decode_base64(written, most)


def is_data_url(url: str) -> bool:
    """Return whether the scheme of a URL is `data`, which may be in capitals."""
    return url[:5].lower() == "data:"


def find_base64(url: str, kind: Kind = "image") -> int:
    """Return where the base64 of a data URL begins. Raises ValidationError if there is none."""
    comma = url.find(",")
    header = url[: max(comma, 0)]
    if comma < 0 or header.count(";") != 1 or not header.lower().endswith(";base64"):
        raise ValidationError(f"invalid {kind} content: {shorten(url)}")
    return comma + 1


async def decode_base64(text: bytes | memoryview, most: int) -> bytes | bytearray:
    """Return decoded base64; other tasks run in between. Raises ValidationError."""
    size = len(text) // 4 * 3
    if size > most + 2:
        raise ValidationError(size_error(size, most))
    # Not in parts: joining those of an image of megabytes would block for milliseconds.
    data, end = bytearray(size), 0
    for start in range(0, len(text), _SLICE):
        piece = b"".join((b'"', text[start : start + _SLICE], b'"'))
        last = start + _SLICE >= len(text)
        if not last and b"=" in piece:
            raise _invalid()
        try:
            part = _BYTES.decode(piece)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _invalid() from error
        data[end : end + len(part)] = part
        end += len(part)
        if not last:
            await trio.lowlevel.checkpoint()
    del data[end:]
    if len(data) > most:
        raise ValidationError(size_error(len(data), most))
    return data


def _invalid() -> ValidationError:
    return ValidationError(INVALID)


def shorten(url: str) -> str:
    """Return a URL as errors show it."""
    return url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
