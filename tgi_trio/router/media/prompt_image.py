"""An image, a video or a sound of a prompt for the engine: its place among the ids, and itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tgi_trio.router.media.layouts.layout import Size
from tgi_trio.router.media.pixel_options import PLAIN, PixelOptions
from tgi_trio.router.media.spool import Compressed


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image, video or sound beside the ids of its prompt, which do not show that it is there.

    *Feature tokens* are those in whose places features of the vision tower replace embeddings. The
    *span* of an image reaches from its first to its last feature token, including marks and
    newlines in between.
    """

    first: int  # place of the span's first token in the prompt's ids
    tokens: int  # length of the span
    feature_places: tuple[tuple[int, int], ...]  # runs of feature tokens: (offset in span, count)
    size: Size  # pixels as seen, before any scaling
    key: bytes  # 32 bytes: SHA-256 of the compressed bytes and of the processor's settings
    # Compressed, as received; decoded again if its place has been lost.
    data: Compressed = field(repr=False)
    nbytes: int = 0  # of its pixels, as a bundle in the arena
    pixel_options: PixelOptions = PLAIN

    @property
    def features(self) -> int:
        """The number of its feature tokens."""
        return sum(count for _, count in self.feature_places)

    @property
    def end(self) -> int:
        """Place after the span's last token."""
        return self.first + self.tokens
