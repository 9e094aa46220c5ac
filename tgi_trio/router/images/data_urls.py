"""Images inside a request: ``data:image/png;base64,...``, the form of RFC 2397 that TGI takes."""

from __future__ import annotations

import binascii
from typing import Final

from tgi_trio.errors import ValidationError

_SHOWN: Final = 80  # characters of a URL in a message
_SLICE: Final = 1 << 18  # characters decoded at once, while nothing else of this process can run


def decode_data_url(url: str, most: int) -> bytes:
    """Return the bytes of a data URL.

    The MIME type is not believed: the bytes themselves say which format they have. Raises
    ValidationError, in TGI's words where it has some; also above `most` bytes, before they are
    decoded.
    """
    comma = url.find(",")
    kind = url[: max(comma, 0)]
    if comma < 0 or kind.count(";") != 1 or not kind.endswith(";base64"):
        raise ValidationError(f"invalid image content: {shorten(url)}")
    begin = comma + 1
    size = (len(url) - begin) // 4 * 3
    if size > most + 2:
        raise ValidationError(size_error(size, most))
    data = bytearray()
    for start in range(begin, len(url), _SLICE):
        piece = url[start : start + _SLICE]
        last = start + _SLICE >= len(url)
        try:
            if not last and "=" in piece:
                raise binascii.Error("Excess data after padding")
            data += binascii.a2b_base64(piece, strict_mode=True)
        except ValueError as error:  # binascii.Error is one; so are letters beyond ASCII
            raise ValidationError(f"base64 encoding is invalid: {error}") from error
    if len(data) > most:
        raise ValidationError(size_error(len(data), most))
    return bytes(data)


def size_error(size: int, most: int) -> str:
    """Return TGI's words for an image of more bytes than one may have, and the flag's name."""
    return (
        f"Image size {size} bytes exceeds maximum allowed size of {most} bytes "
        "(--max-image-fetch-size)"
    )


def shorten(url: str) -> str:
    """Return as much of a URL as a message shows."""
    return url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
