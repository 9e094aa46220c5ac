"""What base64 in a JSON string says of an image, and what an image is called by its bytes.

The router reads small images by it and the processes that decode the large ones, so that neither
answers otherwise than the other.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from hashlib import _Hash

BLOCK: Final = 1 << 16  # bytes of which text lies together (`router.media.spool`)
INVALID: Final = "base64 encoding is invalid: four letters for three bytes, `=` at the end alone"
_BYTES: Final = msgspec.json.Decoder(bytes)  # four times as fast as binascii
_TEXT: Final = msgspec.json.Decoder(str)


def read_text(written: bytes) -> bytes:
    """Return what a JSON string says, in UTF-8: many libraries write ``\\/``, some ``\\u002b``.

    `written`: without its quotes. Raises ValueError.
    """
    if b"\\" not in written:
        return written
    try:
        return _TEXT.decode(b'"%b"' % written).encode()
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(INVALID) from error


def decode_quoted(quoted: bytes | bytearray, most: int) -> bytes:
    """Return an image's bytes from its base64, given as a JSON string with its quotes and escapes.

    Raises ValueError, in TGI's words where it has some; also above `most` bytes.
    """
    escaped = b"\\" in quoted
    if escaped:
        quoted = b'"%b"' % read_text(bytes(quoted[1:-1]))
    size = (len(quoted) - 2) // 4 * 3
    if size - 2 > most:  # two letters at its end may stand for no byte
        raise ValueError(size_error(size, most))
    if escaped and b"\\" in quoted:  # it would be an escape of JSON's below
        raise ValueError(INVALID)
    try:
        data: bytes = _BYTES.decode(quoted)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(INVALID) from error
    if len(data) > most:
        raise ValueError(size_error(len(data), most))
    return data


def size_error(size: int, most: int) -> str:
    """Return TGI's words for an image of more bytes than one may have, and the flag's name."""
    return (
        f"Image size {size} bytes exceeds maximum allowed size of {most} bytes "
        "(--max-image-fetch-size)"
    )


def start_key(settings: str) -> _Hash:
    """Return a hash to be told an image's bytes: its digest, 32 bytes, is the image's key.

    `settings`: of the image processor, which tell apart what makes other pixels of the same bytes.
    """
    return hashlib.sha256(hashlib.sha256(settings.encode()).digest())
