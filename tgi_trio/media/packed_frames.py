"""Pictures one after the other, `data:video/jpeg;base64,<picture>,<picture>`, as one video.

The router packs small ones and the processes that decode them the large ones, so that neither names
them otherwise than the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tgi_trio.media.image_text import decode_quoted, size_error

_PACKED: Final = b"tgi-trio frames\0"  # what packed frames begin with
_COUNT: Final = 8  # bytes that say how many a frame has


def pack_frames(frames: Sequence[bytes | bytearray]) -> bytes:
    """Return pictures as one video."""
    parts = (part for each in frames for part in (len(each).to_bytes(_COUNT), each))
    return b"".join((_PACKED, *parts))


def decode_frames(quoted: bytes | bytearray, most: int) -> bytes:
    """Do what `decode_quoted` does, for a video: base64 of several pictures has commas between."""
    if b"," not in quoted:
        return decode_quoted(quoted, most)
    found = [decode_quoted(b'"' + part + b'"', most) for part in quoted[1:-1].split(b",")]
    if (size := sum(map(len, found))) > most:
        raise ValueError(size_error(size, most))
    return pack_frames(found)


def unpack_frames(data: bytes) -> list[bytes] | None:
    """Return the pictures of a video; None: it is none of `pack_frames`. Raises ValueError."""
    if not data.startswith(_PACKED):
        return None
    found, at = [], len(_PACKED)
    while at < len(data):
        end = at + _COUNT + int.from_bytes(data[at : at + _COUNT])
        if end > len(data):
            raise ValueError("its frames are cut off")
        found.append(data[at + _COUNT : end])
        at = end
    return found
