"""How an image or a video of a prompt is to be seen, beside what its bytes say."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from tgi_trio.router.media.kinds import Kind


@dataclass(frozen=True, slots=True)
class PixelOptions:
    """What makes other pixels of the same bytes."""

    # The prompt has other images, or a sound's has some, and its layout makes more of it then.
    beside: bool = False
    kind: Kind = "image"
    # Of a video: frames that its client wants to be seen, in a second or in all; one of them.
    fps: float | None = None
    num_frames: int | None = None

    def distinguish(self, key: bytes) -> bytes:
        """Return the key, 32 bytes, of what is seen so, from that of its bytes and settings.

        Its kind is in the settings already.
        """
        if self.beside:
            return sha256(key).digest()
        if self.fps is None and self.num_frames is None:
            return key
        return sha256(key + f" {self.fps} {self.num_frames}".encode()).digest()


PLAIN: Final = PixelOptions()
