"""Images in a text, as TGI's native routes take them: an empty link text, a URL in brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# TGI's expression: a link with an empty name, up to the first bracket that closes.
_LINK: Final = re.compile(r"!\[\]\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class ImageLink:
    """Where an image of a prompt is: an http(s) or a data URL, not yet looked at."""

    url: str


def split_text(text: str) -> list[str | ImageLink]:
    """Return the pieces of a prompt in their order, none of them an empty text."""
    pieces: list[str | ImageLink] = []
    begin = 0
    for match in _LINK.finditer(text):
        if match.start() > begin:
            pieces.append(text[begin : match.start()])
        pieces.append(ImageLink(match[1]))
        begin = match.end()
    if begin < len(text):
        pieces.append(text[begin:])
    return pieces
