"""Images inside a request: ``data:image/png;base64,...``, the form of RFC 2397 that TGI takes.

They are decoded in the loop and not in threads: a thread would keep the interpreter's lock for
longer than one slice takes, and nothing else of this process could run either.
"""

from __future__ import annotations

from typing import Final

import msgspec
import trio

from tgi_trio.errors import ValidationError

_SHOWN: Final = 80  # characters of a URL in a message
_SLICE: Final = 1 << 17  # characters decoded at once, in less than a fifth of a millisecond
_LONGEST_ESCAPE: Final = 6  # characters, of \u002b
_BYTES: Final = msgspec.json.Decoder(bytes)  # four times as fast as binascii
_TEXT: Final = msgspec.json.Decoder(str)


class EncodedImage:
    """Base64 of an image, as a JSON string in a body has it; its bytes once they were wanted."""

    def __init__(self, body: bytes | bytearray, begin: int, end: int) -> None:
        """It stands in `body` from `begin` up to `end`, escapes and all."""
        self._body: bytes | bytearray | None = body
        self._span = begin, end
        self._data: bytes | bytearray = b""
        self.length = end - begin  # as written

    def text(self) -> str:
        """Return what the JSON string says; raises ValidationError.

        RuntimeError once it was decoded.
        """
        if self._body is None:
            raise RuntimeError("an image was decoded, and its text is gone")
        begin, end = self._span
        return _read_text(self._body[begin:end])

    async def decode(self, most: int) -> bytes | bytearray:
        """Return the image's bytes, and let go of the body; raises ValidationError."""
        if self._body is not None:
            text = await _unescape(self._body, *self._span)
            self._data = await decode_base64(text, most)
            self._body = None
        return self._data


async def decode_data_url(url: str, most: int) -> bytes | bytearray:
    """Return the bytes of a data URL.

    The MIME type is not believed: the bytes themselves say which format they have. Raises
    ValidationError, in TGI's words where it has some; also above `most` bytes, before they are
    decoded.
    """
    begin = find_base64(url)
    text = url[begin:].encode("utf-8", "surrogatepass")
    if b"\\" in text:  # it would be an escape of JSON's below
        raise _invalid()
    return await decode_base64(text, most)


def find_base64(url: str) -> int:
    """Return where the base64 of a data URL begins; raises ValidationError where it has none."""
    comma = url.find(",")
    kind = url[: max(comma, 0)]
    if comma < 0 or kind.count(";") != 1 or not kind.endswith(";base64"):
        raise ValidationError(f"invalid image content: {shorten(url)}")
    return comma + 1


async def decode_base64(text: bytes | memoryview, most: int) -> bytes | bytearray:
    """Return what base64 says, others running in between; raises ValidationError."""
    size = len(text) // 4 * 3
    if size > most + 2:
        raise ValidationError(size_error(size, most))
    # Not parts to be joined: that would take milliseconds at once, for an image of megabytes.
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


async def _unescape(body: bytes | bytearray, begin: int, end: int) -> bytes | memoryview:
    """Return what a part of a JSON string says: many libraries write ``\\/``, some ``\\u002b``."""
    if body.find(b"\\", begin, end) < 0:
        return memoryview(body)[begin:end]
    parts: list[bytes] = []
    while begin < end:
        last = min(begin + _SLICE, end)
        if last < end:  # no escape is cut in two
            escape = body.find(b"\\", last - _LONGEST_ESCAPE, last)
            last = last if escape < 0 else escape
        parts.append(_read_text(body[begin:last]).encode())
        begin = last
        await trio.lowlevel.checkpoint()
    return b"".join(parts)


def _read_text(written: bytes | bytearray) -> str:
    """Return what a piece of a JSON string says; raises ValidationError."""
    try:
        found: str = _TEXT.decode(b"".join((b'"', written, b'"')))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _invalid() from error
    return found


def _invalid() -> ValidationError:
    return ValidationError(
        "base64 encoding is invalid: four letters for three bytes, `=` at the end alone"
    )


def size_error(size: int, most: int) -> str:
    """Return TGI's words for an image of more bytes than one may have, and the flag's name."""
    return (
        f"Image size {size} bytes exceeds maximum allowed size of {most} bytes "
        "(--max-image-fetch-size)"
    )


def shorten(url: str) -> str:
    """Return as much of a URL as a message shows."""
    return url if len(url) <= _SHOWN else f"{url[:_SHOWN]}..."
