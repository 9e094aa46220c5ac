"""An image of a prompt as the engine knows it: where it stands among the ids, and what it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from tgi_trio.router.images.layouts.layout import ImageSize
from tgi_trio.router.images.spool import Compressed


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image beside the ids of its prompt, which never say by themselves that it is there.

    *Feature tokens* are those at whose places the tower's features stand instead of an embedding.
    Its *span* reaches from the first to the last of them, marks and newlines in between included.
    """

    first: int  # place of the span's first token in the prompt's ids
    tokens: int  # length of the span
    feature_places: tuple[tuple[int, int], ...]  # runs of feature tokens: (offset in span, count)
    size: ImageSize  # pixels as seen, before any scaling
    key: bytes  # 32 bytes: SHA-256 of the compressed bytes and of the processor's settings
    # Compressed, as it came; decoded again after its place is lost.
    data: Compressed = field(repr=False)
    nbytes: int = 0  # of its pixels, as a bundle in the arena

    @property
    def features(self) -> int:
        """How many feature tokens it has."""
        return sum(count for _, count in self.feature_places)

    @property
    def end(self) -> int:
        """Place behind the span's last token."""
        return self.first + self.tokens
